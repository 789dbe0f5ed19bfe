"""Draws docs/benchmarks.svg from a table of docs/BENCHMARKS.md. `make docs` runs it; `--check`
compares."""

from __future__ import annotations

import re
from pathlib import Path

from generated_page import write_or_check

FIGURES = Path(__file__).with_name("BENCHMARKS.md")
TABLE = "| Qwen3-0.6B shape |"
# The rows to draw and their titles.
PANELS = {
    "W1, output tok/s": "32 requests, tokens/s",
    "W3, output tok/s": "one stream, tokens/s",
    "W4, worst stall of running streams, ms": "stall beside a long prompt, ms",
}
PANEL_PX, BAR_PX, LEFT_PX, TOP_PX, ROW_PX = 280, 130, 106, 58, 26
PEER, OURS = "#9fb6c1", "#0b6e99"


def read_table(page: str) -> dict[str, dict[str, float]]:
    """Reads the table's rows: {row: {column: first number of the cell}}, servers' columns alone."""
    lines = page[page.index(TABLE) :].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        row[0]: {
            server: float(re.findall(r"\d[\d,]*(?:\.\d+)?", cell)[0].replace(",", ""))
            for server, cell in zip(header, row, strict=True)
            if server.startswith(("vLLM", "Penstock"))
        }
        for row in rows
    }


def bar(row: int, server: str, value: float, longest: float) -> str:
    """Draws one server's name, bar and figure."""
    ours = server.startswith("Penstock")
    top, width = TOP_PX + row * ROW_PX, max(1, round(BAR_PX * value / longest))
    weight = ' font-weight="600"' if ours else ""
    box = f'x="{LEFT_PX}" y="{top}" width="{width}" height="18" rx="3"'
    return (
        f'    <text x="{LEFT_PX - 8}" y="{top + 14}" text-anchor="end"{weight}>{server}</text>'
        f'<rect {box} fill="{OURS if ours else PEER}"/>'
        f'<text x="{LEFT_PX + width + 6}" y="{top + 14}"{weight}>{value:,g}</text>'
    )


def render(page: str) -> str:
    """Draws a panel per row of PANELS, with the figures in the picture's title."""
    rows = read_table(page)
    drawn, titles = [], []
    for number, (row, title) in enumerate(PANELS.items()):
        values = rows[row]
        drawn.append(f'  <g transform="translate({14 + number * PANEL_PX} 0)" fill="#16323e">')
        drawn.append(f'    <text x="8" y="36" font-size="14" font-weight="600">{title}</text>')
        drawn += [
            bar(at, server, value, max(values.values()))
            for at, (server, value) in enumerate(values.items())
        ]
        drawn.append("  </g>")
        titles.append(
            f"{title}: " + ", ".join(f"{name} {value:,g}" for name, value in values.items())
        )
    width, height = 20 + len(PANELS) * PANEL_PX, TOP_PX + len(values) * ROW_PX + 12
    frame = f'width="{width - 2}" height="{height - 2}" rx="14" fill="#f7fafb" stroke="#d5e0e5"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
            f'  width="{width}" height="{height}" aria-labelledby="title" font-size="12"',
            '  font-family="system-ui, -apple-system, Helvetica, Arial, sans-serif">',
            f'  <title id="title">Qwen3-0.6B on two CPU cores. {"; ".join(titles)}.</title>',
            f'  <rect x="1" y="1" {frame}/>',
            *drawn,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    picture = FIGURES.with_name("benchmarks.svg")
    raise SystemExit(write_or_check(picture, render(FIGURES.read_text())))
