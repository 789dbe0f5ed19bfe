"""What a queue in front of a server costs: processor time of each process for a token.

    python -m bench.upstream --streams 32 --tokens 200 --step-ms 100

A scripted upstream sends a token to each stream in each step and computes nothing, so the figures
hold on a busy machine, too. It runs in this process, which is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from bench.load_client import completions, new_session
from bench.machine import conditions
from bench.workloads import Prompts, Work, run_all
from shared.text.checkpoint_text import load_tokenizer_and_eos
from tests.support.launched import Launched, descendants_of
from tests.support.scripted_upstream import ScriptedUpstream
from worker.settings import DEMO_CHECKPOINT

MODEL = "demo"
PROMPT_TOKENS = 200
LEAST_US = 2  # of a token; processes that took less are not shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=100, help="of the upstream")
    arguments = parser.parse_args()
    tokenizer, _ = load_tokenizer_and_eos(DEMO_CHECKPOINT)
    with tempfile.TemporaryDirectory() as place, ScriptedUpstream(tokenizer) as upstream:
        upstream.faults.token_s = arguments.step_ms / 1000
        env = {
            "MODEL": str(DEMO_CHECKPOINT),
            "SERVED_MODEL_NAME": MODEL,
            "ENGINE": "http",
            "UPSTREAM_URLS": upstream.url,
            "MAX_NUM_SEQS": str(arguments.streams),
            "LOG_LEVEL": "WARNING",
        }
        with Launched(Path(place), env, is_forked=False) as penstock:
            used = asyncio.run(_run(penstock, arguments.streams, arguments.tokens))
    print(conditions())
    for name, spent_us in used.items():
        print(f"{name}: {spent_us:.0f} us for a token")
    print(f"all: {sum(used.values()):.0f} us for a token")


async def _run(penstock: Launched, streams: int, tokens: int) -> dict[str, float]:
    """Returns the microseconds of processor time for a token, by process."""
    processes = [penstock.pid, *descendants_of(penstock.pid)]
    prompts = Prompts(range(300, 400), 1)
    async with new_session() as session:
        send = completions(session, penstock.base_url, MODEL)
        await run_all(send, [Work(prompts.take(PROMPT_TOKENS), 4) for _ in range(4)], 4)
        before = {process: _spent_s(process) for process in processes}
        works = [Work(prompts.take(PROMPT_TOKENS), tokens) for _ in range(streams)]
        for seen in await run_all(send, works, streams):
            assert seen.num_out == tokens, seen.error
    used = {process: _spent_s(process) - before[process] for process in processes}
    spent_us = {_name(process): used[process] * 1e6 / streams / tokens for process in processes}
    return {name: value for name, value in spent_us.items() if value >= LEAST_US}


def _spent_s(process: int) -> float:
    cells = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")


def _name(process: int) -> str:
    """A process's own name, or its arguments but for the interpreter."""
    command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"{process} {' '.join(command.split()[1:3]) or command}"


if __name__ == "__main__":
    main()
