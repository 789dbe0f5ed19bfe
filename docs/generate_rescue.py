"""Draws docs/rescue.svg from docs/rescue.json, which `python -m bench.rescue` records. `make docs`
runs it; `--check` compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from generated_page import write_or_check

RECORD = Path(__file__).with_name("rescue.json")
LOOP_S = 20.0
PLAY_S = 12.0  # of the loop, in which the run is shown; its end stands still for the rest
COLUMNS, CHAR_PX, LINE_PX = 66, 7.8, 22
LEFT_PX, TEXT_PX = 36, 134  # of the answer's first character and baseline
BAR_PX, BAR_TOP_PX = 808, 312
MAX_LINES = 5
STYLE = """
  svg{--paper:#f7fafb;--line:#d5e0e5;--card:#fff;--ink:#16323e;--faint:#4d6672;
    --a:#0b6e99;--b:#1a7340;--bad:#b3261e}
  @media (prefers-color-scheme:dark){svg{--paper:#10161c;--line:#2d3a46;--card:#18212a;
    --ink:#e4ebf1;--faint:#9aabba;--a:#5cc0ea;--b:#6fd396;--bad:#ff9a92}}
  text{fill:var(--ink);font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
  .mono{font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
  .head{font-size:17px;font-weight:600}.name{font-weight:600}
  .faint{fill:var(--faint)}.bad{fill:var(--bad)}.a{fill:var(--a)}.b{fill:var(--b)}
  .paper{fill:var(--paper);stroke:var(--line)}.card{fill:var(--card);stroke:var(--line)}
  .cover{fill:var(--card)}.track{fill:var(--line)}
  @media (prefers-reduced-motion:reduce){*{animation:none!important}}
"""


def check(record: dict[str, Any]) -> int:
    """Checks that the record is one of a rescue. Returns the number of tokens of attempt 1."""
    times = [came_ms for came_ms, _ in record["tokens"]]
    first, second = record["attempts"]
    resumed = int(second["tokens"])
    assert "".join(text for _, text in record["tokens"]) == record["undisturbed"], "another text"
    assert times == sorted(times), "times go back"
    assert (first["outcome"], second["outcome"]) == ("died", "ended"), "no worker died"
    assert times[resumed - 1] < second["started_ms"] < times[resumed], "not at that token"
    assert first["started_ms"] < record["killed_ms"] < second["started_ms"]
    return resumed


def wrap(text: str) -> list[tuple[int, int]]:
    """Returns the lines of a text as ranges of characters, without the spaces at their ends."""
    lines, begin = [], 0
    while len(text) - begin > COLUMNS:
        end = text.rindex(" ", begin, begin + COLUMNS + 1)
        lines.append((begin, end))
        begin = end + 1
    return [*lines, (begin, len(text))]


class Clock:
    """Times of the record as percentages of the loop."""

    def __init__(self, end_ms: int) -> None:
        self.slowness = PLAY_S / (end_ms / 1000)

    def percent(self, ms: float) -> str:
        return f"{ms / 10 * self.slowness / LOOP_S:.2f}%"

    def at(self, name: str, ms: float, *, shown: bool = True) -> str:
        """Returns a rule that shows the elements of a class from a time on, or hides them."""
        before, after = (0, 1) if shown else (1, 0)
        return (
            f"  @keyframes {name}{{0%{{opacity:{before}}}{self.percent(ms)}{{opacity:{after}}}}}"
            f".{name}{{opacity:{after};animation:{name} {LOOP_S:g}s step-end infinite}}"
        )


def answer(record: dict[str, Any], resumed: int, clock: Clock) -> tuple[list[str], list[str]]:
    """Draws the answer, a cover over each line that moves away as the tokens came: rules, nodes."""
    ends, total = [], 0
    for came_ms, text in record["tokens"]:
        total += len(text)
        ends.append((came_ms, total))
    split = ends[resumed - 1][1]
    lines = wrap(record["undisturbed"])
    assert len(lines) <= MAX_LINES, "the answer is too long for the picture"
    rules, nodes = [], []
    for number, (begin, end) in enumerate(lines):
        top = TEXT_PX + number * LINE_PX
        for kind, start, stop in (("a", begin, min(end, split)), ("b", max(begin, split), end)):
            if stop <= start:
                continue
            piece = record["undisturbed"][start:stop]
            left = LEFT_PX + (start - begin + len(piece) - len(piece.lstrip())) * CHAR_PX
            width = len(piece.strip()) * CHAR_PX
            nodes.append(
                f'  <text class="mono {kind}" x="{left:.1f}" y="{top}" textLength="{width:.1f}"'
                f' lengthAdjust="spacingAndGlyphs">{escape(piece.strip())}</text>'
            )
        steps, seen = ["0%{transform:none}"], 0
        for came_ms, place in ends:
            now = min(max(place - begin, 0), end - begin)
            if now > seen:
                moved = f"translateX({now * CHAR_PX:.1f}px)"
                steps.append(f"{clock.percent(came_ms)}{{transform:{moved}}}")
                seen = now
        rules.append(
            f"  @keyframes l{number}{{{''.join(steps)}}}"
            f".l{number}{{transform:translateX(600px);"
            f"animation:l{number} {LOOP_S:g}s step-end infinite}}"
        )
        nodes.append(
            f'  <rect class="cover l{number}" x="{LEFT_PX}" y="{top - 16}" width="530"'
            ' height="21"/>'
        )
    return rules, nodes


def timeline(record: dict[str, Any], end_ms: int, clock: Clock) -> tuple[list[str], list[str]]:
    """Draws the attempts and the gap between them on a line, which is uncovered by and by."""
    first, second = record["attempts"]
    marks = [first["started_ms"], record["killed_ms"], second["started_ms"], end_ms]
    x0, x1, x2, x3 = (LEFT_PX + BAR_PX * ms / end_ms for ms in marks)
    gap_ms = second["started_ms"] - record["killed_ms"]
    bar = f'y="{BAR_TOP_PX}" height="18"'
    begin, end = f"{clock.percent(0)}{{transform:none}}", clock.percent(end_ms)
    rules = [
        f"  @keyframes go{{{begin}{end},100%{{transform:translateX({BAR_PX}px)}}}}"
        f".go{{transform:translateX({BAR_PX}px);animation:go {LOOP_S:g}s linear infinite}}"
    ]
    below, above = BAR_TOP_PX + 36, BAR_TOP_PX - 8
    nodes = [
        f'  <rect class="track" x="{LEFT_PX}" {bar} width="{BAR_PX}" rx="3"/>',
        '  <g clip-path="url(#bar)">',
        f'    <rect class="a" x="{x0:.1f}" {bar} width="{x1 - x0:.1f}"/>',
        f'    <rect fill="url(#gap)" x="{x1:.1f}" {bar} width="{x2 - x1:.1f}"/>',
        f'    <rect class="b" x="{x2:.1f}" {bar} width="{x3 - x2:.1f}"/>',
        f'    <rect class="track go" x="{LEFT_PX}" {bar} width="{BAR_PX}"/>',
        "  </g>",
        f'  <text class="a" x="{x0:.1f}" y="{above}">worker A</text>',
        f'  <text class="bad killed" x="{(x1 + x2) / 2:.1f}" y="{above}" text-anchor="middle">'
        "no worker</text>",
        f'  <text class="b resumed" x="{x3:.1f}" y="{above}" text-anchor="end">worker B</text>',
        f'  <text class="faint" x="{LEFT_PX}" y="{below}">0 ms</text>',
        f'  <text class="bad killed" x="{x1:.1f}" y="{below}">kill -9 at {marks[1]} ms</text>',
        f'  <text class="b resumed" x="{x2:.1f}" y="{below}" text-anchor="end">'
        f"resumed {gap_ms} ms later</text>",
        f'  <text class="faint done" x="{x3:.1f}" y="{below}" text-anchor="end">{end_ms} ms</text>',
    ]
    return rules, nodes


def worker(top: int, name: str, states: list[tuple[str, str]]) -> list[str]:
    """Draws a worker's box with its states one over another; each has a class that shows it."""
    nodes = [
        f'  <rect class="card" x="606" y="{top}" width="254" height="74" rx="8"/>',
        f'  <text class="name" x="622" y="{top + 26}">{name}</text>',
    ]
    return nodes + [
        f'  <text class="{kind}" x="622" y="{top + 50}">{text}</text>' for kind, text in states
    ]


def render(record: dict[str, Any]) -> str:
    """Draws the picture. Raises AssertionError for a record without a rescue."""
    resumed = check(record)
    end_ms, total = record["tokens"][-1][0], len(record["tokens"])
    clock = Clock(end_ms)
    moving, drawn = answer(record, resumed, clock)
    going, line = timeline(record, end_ms, clock)
    resumed_ms = record["attempts"][1]["started_ms"]
    rules = [
        *moving,
        *going,
        clock.at("alive", record["killed_ms"], shown=False),
        clock.at("killed", record["killed_ms"]),
        clock.at("idle", resumed_ms, shown=False),
        clock.at("resumed", resumed_ms),
        clock.at("done", end_ms),
    ]
    gap_ms = resumed_ms - record["killed_ms"]
    title = (
        f"A recorded run: worker A is killed with kill -9 after token {resumed} of an answer. "
        f"{gap_ms} milliseconds later worker B continues it with token {resumed + 1}. The client's "
        "stream, one connection, has the same text as without the kill."
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 396" width="880" height="396"'
            ' role="img" aria-labelledby="title">',
            f'  <title id="title">{title}</title>',
            f"  <style>{STYLE}" + "\n".join(rules) + "\n  </style>",
            '  <defs><clipPath id="term"><rect x="21" y="57" width="568" height="206"/></clipPath>'
            f'<clipPath id="bar"><rect x="{LEFT_PX}" y="{BAR_TOP_PX}" width="{BAR_PX}" height="18"'
            ' rx="3"/></clipPath><pattern id="gap" width="7" height="7" '
            'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="cover" '
            'width="7" height="7"/><rect class="bad" width="3" height="7"/></pattern></defs>',
            '  <rect class="paper" x="1" y="1" width="878" height="394" rx="14"/>',
            '  <text class="head" x="20" y="36">kill -9 in the middle of an answer</text>',
            f'  <text class="faint" x="860" y="36" text-anchor="end">a recorded run, shown '
            f"{clock.slowness:.0f} times slower</text>",
            '  <rect class="card" x="20" y="56" width="570" height="208" rx="8"/>',
            f'  <text class="mono faint" x="{LEFT_PX}" y="82">$ curl -N '
            "localhost:8000/v1/chat/completions …</text>",
            f'  <text class="mono" x="{LEFT_PX}" y="106">{escape(record["question"])}</text>',
            '  <g clip-path="url(#term)">',
            *drawn,
            "  </g>",
            f'  <text class="done" x="{LEFT_PX}" y="252">{total} tokens over one connection: the '
            "same text as without the kill.</text>",
            *worker(
                56,
                "Worker A",
                [
                    ("a alive", "writes the answer"),
                    ("bad killed", f"killed after token {resumed}"),
                ],
            ),
            *worker(
                142,
                "Worker B",
                [("faint idle", "ready"), ("b resumed", f"continues with token {resumed + 1}")],
            ),
            '  <text class="faint" x="606" y="240">Each token is in Redis before the</text>',
            '  <text class="faint" x="606" y="258">client sees it.</text>',
            *line,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    picture = RECORD.with_name("rescue.svg")
    raise SystemExit(write_or_check(picture, render(json.loads(RECORD.read_text()))))
