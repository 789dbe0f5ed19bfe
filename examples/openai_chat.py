"""A streamed chat with OpenAI's SDK: only the base URL is Penstock's.

    pip install openai
    python examples/openai_chat.py "What is a penstock?"

PENSTOCK_URL is a frontend (http://127.0.0.1:8000 without it), PENSTOCK_KEY a key, where the service
asks for one.
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_KEY", "none"),
)
question = " ".join(sys.argv[1:]) or "What is a penstock?"
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=200,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage is not None:
        print(f"\n{model}: {chunk.usage.completion_tokens} tokens")
