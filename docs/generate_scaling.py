"""Writes the tables of docs/SCALING.md and docs/scaling.svg from the capacity model. `make docs`
runs it; `--check` only compares."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
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

SHARDS = (1, 3, 8, 32)
PICTURE = PAGE.with_name("scaling.svg")
MOST_WORKERS = WORKERS[-1]
LEAST_SHARE, MOST_SHARE = 1e-3, 1e3  # of a limit; both axes are logarithmic
PANEL_PX, PLOT_PX, HIGH_PX, LEFT_PX, TOP_PX = 420, 236, 216, 78, 58
STYLE = """
  svg{--paper:#f7fafb;--line:#d5e0e5;--ink:#16323e;--soft:#5d7480}
  svg{--redis_cpu:#b3261e;--redis_memory:#0b6e99;--redis_network:#5b7f2b;--redis_connections:#8a5ab0}
  @media (prefers-color-scheme:dark){svg{--paper:#10161c;--line:#2d3a46;--ink:#e3edf3;--soft:#9ab;
    --redis_cpu:#ff8a80;--redis_memory:#62c3ef;--redis_network:#a9cf6f;--redis_connections:#c9a0ee}}
"""


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


def shards() -> str:
    """Returns a table of the first limit by the number of a cluster's shards."""
    heads = (f"{number} shard{'s' if number > 1 else ''}" for number in SHARDS)
    lines = [f"| a worker | {' | '.join(heads)} |", "| --- |" + " --- |" * len(SHARDS)]
    for name, load in EXAMPLES.items():
        cells = []
        for number in SHARDS:
            used = with_workers(replace(load, shards=number), MOST_WORKERS).shares(SERVER)
            first = bottleneck(used)
            cells.append(f"{LIMITS[first]}, {MOST_WORKERS / used[first]:,.0f} workers")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """Draws the shares of Redis' limits by the number of workers, a panel for each example."""
    panels = [
        f'  <g transform="translate({number * PANEL_PX} 0)">\n{_panel(name, load)}\n  </g>'
        for number, (name, load) in enumerate(EXAMPLES.items())
    ]
    width, height = len(EXAMPLES) * PANEL_PX, TOP_PX + HIGH_PX + 48
    frame = f'width="{width - 2}" height="{height - 2}" rx="14" style="fill:var(--paper)"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
            f'  width="{width}" height="{height}" aria-labelledby="title" font-size="12"',
            '  font-family="system-ui, -apple-system, Helvetica, Arial, sans-serif">',
            '  <title id="title">Shares of the limits of one Redis by number of workers</title>',
            f"  <style>{STYLE}  </style>",
            f'  <rect x="1" y="1" {frame}/>',
            *panels,
            "</svg>\n",
        ]
    )


def _panel(name: str, load: Load) -> str:
    drawn = [_text(LEFT_PX, 34, f"Workers of {name}", "ink", 'font-weight="600"')]
    for power in range(round(math.log10(LEAST_SHARE)), round(math.log10(MOST_SHARE)) + 1, 1):
        y, is_full = _y(10.0**power), power == 0
        line = f"stroke:var(--{'ink' if is_full else 'line'})"
        drawn.append(
            f'    <path d="M{LEFT_PX} {y:.0f}h{PLOT_PX}" style="{line}" stroke-width="1"/>'
        )
        share = f"{100 * 10.0**power:,g} %"
        drawn.append(_text(LEFT_PX - 8, y + 4, share, "soft", 'text-anchor="end"'))
    for workers in (1, *WORKERS):
        anchor = 'text-anchor="middle"'
        drawn.append(_text(_x(workers), TOP_PX + HIGH_PX + 20, f"{workers:,}", "soft", anchor))
    drawn.append(
        _text(
            LEFT_PX + PLOT_PX / 2, TOP_PX + HIGH_PX + 37, "workers", "soft", 'text-anchor="middle"'
        )
    )
    numbers = sorted({round(10 ** (step / 8)) for step in range(8 * 3 + 1)})
    shares = {number: with_workers(load, number).shares(SERVER) for number in numbers}
    lowest = 0.0  # of the names so far, which do not overlap
    for limit in sorted(LIMITS, key=shares[MOST_WORKERS].__getitem__, reverse=True):
        points = " ".join(
            f"{_x(number):.1f},{_y(shares[number][limit]):.1f}"
            for number in numbers
            if shares[number][limit] >= LEAST_SHARE
        )
        color = f"var(--{limit})"
        drawn.append(
            f'    <polyline points="{points}" fill="none" style="stroke:{color}" stroke-width="2"/>'
        )
        lowest = max(lowest + 14, _y(shares[MOST_WORKERS][limit]) + 4)
        drawn.append(_text(LEFT_PX + PLOT_PX + 8, lowest, LIMITS[limit], limit))
    return "\n".join(drawn)


def _x(workers: float) -> float:
    return LEFT_PX + PLOT_PX * math.log(workers) / math.log(MOST_WORKERS)


def _y(share: float) -> float:
    return TOP_PX + HIGH_PX * math.log(MOST_SHARE / share) / math.log(MOST_SHARE / LEAST_SHARE)


def _text(x: float, y: float, text: str, color: str, more: str = "") -> str:
    style = f'style="fill:var(--{color})"'
    return f'    <text x="{x:.0f}" y="{y:.0f}" {style} {more}>{text}</text>'.replace(" >", ">")


def _link(source: str) -> str:
    page, _, section = source.partition("#")
    return f"[{Path(page).stem}, {section.replace('-', ' ')}]({source})"


def render() -> str:
    """Returns the page with its tables."""
    tables = {"costs": costs, "bottlenecks": bottlenecks, "shards": shards}
    return PLACE.sub(lambda found: found[1] + tables[found[2]]() + found[3], PAGE.read_text())


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render()) or write_or_check(PICTURE, picture()))
