"""LangChain over Penstock: a prompt template, a model and a parser, streamed.

    pip install langchain-openai
    python examples/langchain_chat.py "the river"

`stream_usage=True` asks for the counts of tokens, which LangChain leaves out for servers of others.
PENSTOCK_URL and PENSTOCK_KEY as in openai_chat.py.
"""

import os
import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

base_url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1"
key = os.environ.get("PENSTOCK_KEY", "none")
model = OpenAI(base_url=base_url, api_key=key).models.list().data[0].id
prompt = ChatPromptTemplate.from_messages(
    [("system", "You answer in one sentence."), ("user", "Tell me of {thing}.")]
)
chat = ChatOpenAI(
    model=model, base_url=base_url, api_key=key, max_tokens=100, temperature=0, stream_usage=True
)
chain = prompt | chat | StrOutputParser()
for piece in chain.stream({"thing": " ".join(sys.argv[1:]) or "the river"}):
    print(piece, end="", flush=True)
print()
