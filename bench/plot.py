"""The sweep as a picture: throughput and latencies against concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from bench.workloads import Row

matplotlib.use("Agg")
from matplotlib import pyplot


def plot_sweep(rows: Sequence[Row], path: Path) -> None:
    """Writes an image; `rows` are those of the sweep, of one or several labels."""
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    for label in sorted({row["label"] for row in rows}):
        own = sorted((row for row in rows if row["label"] == label), key=lambda r: r["concurrency"])
        at = [row["concurrency"] for row in own]
        left.plot(at, [row["out_tok_s"] for row in own], marker="o", label=label)
        for panel, name in ((middle, "ttft"), (right, "gap")):
            for q, line in (("p50", "-"), ("p99", "--")):
                values = [row[f"{name}_{q}_ms"] for row in own]
                panel.plot(at, values, line, marker=".", label=f"{label} {q}")
    for panel, title in (
        (left, "output tokens / s"),
        (middle, "time to first token, ms"),
        (right, "between tokens, ms"),
    ):
        panel.set(title=title, xlabel="streams at once", xscale="log", ylim=(0, None))
        panel.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
