"""Thousands of prompts, some under way at once, and no more than the service takes.

    pip install penstock
    python examples/many_prompts.py < prompts.txt > answers.jsonl        # a prompt a line

The queue between reader and workers is bounded, so prompts are read as fast as they are answered.
If the service is overloaded (429, 503), the client waits for as long as its response asks; a
frontend that dies costs nothing. PENSTOCK_URL and PENSTOCK_KEY as in resume.py.
"""

import asyncio
import json
import sys

from penstock.client import AsyncClient, PenstockError

AT_ONCE = 32


async def answer(client: AsyncClient, prompts: asyncio.Queue) -> None:
    while (item := await prompts.get()) is not None:
        number, prompt = item
        row = {"number": number, "prompt": prompt}
        try:
            found = await client.chat(prompt, max_tokens=100).result()
            row |= {"text": found.text, "tokens": found.usage["completion_tokens"]}
        except PenstockError as error:
            row |= {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), flush=True)


async def main() -> None:
    prompts: asyncio.Queue = asyncio.Queue(maxsize=AT_ONCE)
    async with AsyncClient(patience_s=600) as client, asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(answer(client, prompts))
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):  # other prompts continue
            if line.strip():
                await prompts.put((number, line.strip()))
                number += 1
        for _ in range(AT_ONCE):
            await prompts.put(None)


asyncio.run(main())
