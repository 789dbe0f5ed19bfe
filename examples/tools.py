"""A tool that the model calls: its arguments are always valid against the schema.

    pip install openai
    python examples/tools.py "How high does the river stand at the mill?"

The first turn must call the tool (`tool_choice="required"`); with "auto" the model decides. Needs a
model whose chat template has tools, such as Qwen3. PENSTOCK_URL and PENSTOCK_KEY as in
openai_chat.py.
"""

import json
import os
import sys

from openai import OpenAI

LEVELS = {"mill": 1.2, "bridge": 2.7, "dam": 14.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "level",
        "description": "Returns the level of the river in metres.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": list(LEVELS)}},
            "required": ["place"],
        },
    },
}

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_KEY", "none"),
)
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "How high does the river stand at the mill?"
messages = [{"role": "user", "content": question}]
turn = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=300,
)
message = turn.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or ():
    place = json.loads(call.function.arguments)["place"]
    print(f"level({place!r}) = {LEVELS[place]}")
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"metres": LEVELS[place]})}
    )
answer = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=100
)
print(answer.choices[0].message.content)
