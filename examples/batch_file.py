"""A batch with OpenAI's SDK: a file of requests, run when nothing more urgent waits.

    pip install openai
    python examples/batch_file.py prompts.txt > answers.jsonl            # a prompt a line

Rows have the lowest priority, survive the death of any process, and are computed once each. The
answers come in the order of the prompts. PENSTOCK_URL and PENSTOCK_KEY as in openai_chat.py.
"""

import json
import os
import sys
import time
from pathlib import Path

from openai import OpenAI

if len(sys.argv) != 2:
    sys.exit(__doc__)
client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_KEY", "none"),
)
model = client.models.list().data[0].id
prompts = [line for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
rows = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 100,
        },
    }
    for number, prompt in enumerate(prompts)
]
lines = "\n".join(map(json.dumps, rows)).encode()
file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
    if batch.request_counts is not None:
        done, total = batch.request_counts.completed, batch.request_counts.total
        print(f"{batch.status}: {done} of {total}", file=sys.stderr)
if batch.status != "completed":
    sys.exit(f"The batch is {batch.status}: {batch.errors}")
answers = {}
for name in (batch.output_file_id, batch.error_file_id):
    if name is not None:
        for line in client.files.content(name).text.splitlines():
            row = json.loads(line)
            answers[int(row["custom_id"])] = row["response"]["body"]
for number, prompt in enumerate(prompts):
    body = answers[number]
    text = body["choices"][0]["message"]["content"] if "choices" in body else None
    print(json.dumps({"prompt": prompt, "text": text, "error": body.get("error")}))
