"""Writes the tables of docs/SCALING.md from the capacity model. `make docs` runs it; `--check` only
compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from generated_page import write_or_check

from penstock.capacity import (
    COSTS,
    LIMITS,
    TOKEN_COSTS,
    WORKERS,
    Load,
    Server,
    bottleneck,
    with_workers,
)

PAGE = Path(__file__).with_name("SCALING.md")
PLACE = re.compile(r"(<!-- make docs: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SERVER = Server(memory_bytes=16e9, network_bytes_per_s=10e9 / 8)
# A small worker, and one that is as fast as an H100 with Qwen3-0.6B (BENCHMARKS, "On a GPU").
EXAMPLES = {
    "2,500 tokens/s with 64 streams": Load(1, 1000, 300, 2500, 64),
    "19,000 tokens/s with 256 streams": Load(1, 1000, 300, 19_000, 256),
}


def costs() -> str:
    """Returns the tables of constants."""
    lines = [
        "| per token, by the streams of a worker | cost | unit | measured |",
        "| --- | --- | --- | --- |",
    ]
    for name, token in TOKEN_COSTS.items():
        values = ", ".join(f"{streams}: {cost:g}" for streams, cost in token.by_streams.items())
        lines.append(f"| {name} | {values} | {token.unit} | {_link(token.source)} |")
    lines += ["", "| each | cost | unit | measured |", "| --- | ---: | --- | --- |"]
    lines += [
        f"| {name} | {cost.value:,g} | {cost.unit} | {_link(cost.source)} |"
        for name, cost in COSTS.items()
    ]
    return "\n".join(lines) + "\n"


def bottlenecks() -> str:
    """Returns a table for each example."""
    lines = [
        "| a worker | workers | requests/s | frontends | running | "
        + " | ".join(LIMITS.values())
        + " | first limit, full at |",
        "| --- |" + " ---: |" * (4 + len(LIMITS)) + " --- |",
    ]
    for name, load in EXAMPLES.items():
        for workers in WORKERS:
            need = with_workers(load, workers)
            shares = need.shares(SERVER)
            first = bottleneck(shares)
            used = " | ".join(f"{100 * share:,.0f} %" for share in shares.values())
            lines.append(
                f"| {name} | {workers:,} | {need.requests_per_s:,.0f} | {need.frontends:,} "
                f"| {need.running:,.0f} | {used} "
                f"| {LIMITS[first]}, {workers / shares[first]:,.0f} workers |"
            )
    return "\n".join(lines) + "\n"


def _link(source: str) -> str:
    page, _, section = source.partition("#")
    return f"[{Path(page).stem}, {section.replace('-', ' ')}]({source})"


def render() -> str:
    """Returns the page with its tables."""
    tables = {"costs": costs, "bottlenecks": bottlenecks}
    return PLACE.sub(lambda found: found[1] + tables[found[2]]() + found[3], PAGE.read_text())


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render()))
