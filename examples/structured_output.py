"""An answer as an object: it is valid against the schema, whatever the model is.

    pip install openai pydantic
    python examples/structured_output.py "The dam at Aare was built in 1952 and is 58 m high."

A grammar restricts the tokens, so no answer has to be parsed twice; `max_tokens` can cut one off.
PENSTOCK_URL and PENSTOCK_KEY as in openai_chat.py.
"""

import os
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Dam(BaseModel):
    kind: Literal["gravity", "arch", "embankment", "unknown"]
    year: int = Field(ge=1000, le=2100)
    height_m: int = Field(ge=0, le=400)


client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_KEY", "none"),
)
text = " ".join(sys.argv[1:]) or "The dam at Aare was built in 1952 and is 58 m high."
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": f"What does this text state about the dam? {text}"}],
    response_format=Dam,
    max_tokens=100,
    temperature=0,
)
dam = answer.choices[0].message.parsed
print(dam.model_dump_json() if dam is not None else "cut off")
