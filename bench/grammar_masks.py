"""What structured output costs on the host: compiling a grammar, and a mask for each row and token.

    python -m bench.grammar_masks [--tiktoken FILE] [--size 151936] [--rows 1 8 32]

Each row generates a document that follows the grammar, each from another place. Without a
vocabulary file (lines of base64 and rank, as tiktoken has them) the demo model's entries are joined
in pairs until there are as many. Prints one JSON line for each grammar and number of rows.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.messages import Grammar, SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import json_object_grammar, json_schema_grammar, regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.row import SamplingRow

DEMO = Path(__file__).parents[1] / "worker/demo/checkpoint"
SENTENCE = "The gate at its top decides how much water may enter, and no more than that. "
PARAGRAPH = (SENTENCE * 6).strip()
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "placed": {"type": "string", "format": "date-time"},
        "state": {"enum": ["open", "shut", "under repair"]},
        "keepers": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 16, "maximum": 99},
                    "phone": {"type": ["string", "null"], "pattern": "^\\+[0-9]{6,14}$"},
                },
                "required": ["name", "age", "phone"],
                "additionalProperties": False,
            },
        },
        "depth": {"type": "number", "minimum": 0, "maximum": 1000},
        "report": {"type": "string"},
    },
    "required": ["id", "placed", "state", "keepers", "depth", "report"],
    "additionalProperties": False,
}
KEEPER = {"name": "Grete Wasserfall", "age": 41, "phone": "+4712345678"}
ORDER_TEXT = json.dumps(
    {
        "id": "0190b2c4-6a1e-7c3d-9f10-4b5a6c7d8e9f",
        "placed": "2024-02-29T16:20:05.250+02:00",
        "state": "under repair",
        "keepers": [KEEPER] * 3,
        "depth": 12.75,
        "report": PARAGRAPH,
    },
    indent=2,
)
GRAMMARS: dict[str, tuple[Grammar, str]] = {
    "schema": (json_schema_grammar(ORDER, "schema"), ORDER_TEXT),
    "json_object": (json_object_grammar(), ORDER_TEXT),
    "regex": (regex_grammar(r"([A-Z][^.]*\. ?)+", "regex"), PARAGRAPH),
}


class Vocabulary:
    """Entries of bytes; the last one ends a sequence."""

    marker_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[bytes], size: int) -> None:
        rng = random.Random(0)
        found = dict.fromkeys(piece for piece in pieces if piece)
        real = list(found)
        while len(found) < size - 1:
            found[rng.choice(real) + rng.choice(real)] = None
        self._pieces = [*list(found)[: size - 1], b"<end>"]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}
        self._longest = max(map(len, self._pieces))

    def piece_table(self, size: int) -> list[bytes]:
        return self._pieces[:size]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The longest entry first, and so on."""
        data, token_ids = text.encode(), []
        while data:
            length = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            token_ids.append(self._ids[data[:length]])
            data = data[length:]
        return token_ids


class _TimedMasks(GrammarMasks):
    """Times the masks themselves, before they meet the logits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.filled_s: list[float] = []

    def masks_of(
        self, rows: Mapping[int, SamplingRow]
    ) -> tuple[list[int], NDArray[np.int32], dict[int, str]]:
        begin_s = time.perf_counter()
        made = super().masks_of(rows)
        self.filled_s.append(time.perf_counter() - begin_s)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiktoken", type=Path, help="a vocabulary file")
    parser.add_argument("--size", type=int, default=151_936, help="entries of the vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    vocabulary = Vocabulary(_pieces(arguments.tiktoken), arguments.size)
    compiler = GrammarCompiler(vocabulary, arguments.size, (arguments.size - 1,))
    begin_s = time.perf_counter()
    compiler.build()
    print(json.dumps({"vocabulary": arguments.size, "build_s": _rounded(begin_s, 1)}))
    for name, (grammar, text) in GRAMMARS.items():
        begin_s = time.perf_counter()
        compiler.matcher(grammar)
        compile_ms = _rounded(begin_s, 1e3)
        for num_rows in arguments.rows:
            figures = _measure(compiler, arguments.size - 1, grammar, text, vocabulary, num_rows)
            print(json.dumps({"grammar": name, "compile_ms": compile_ms, **figures}), flush=True)


def _pieces(file: Path | None) -> list[bytes]:
    if file is None:
        tokenizer = load_tokenizer(DEMO)
        table = tokenizer.piece_table(tokenizer.vocab_size)
        assert table is not None
        return [piece for i, piece in enumerate(table) if i not in tokenizer.marker_ids]
    return [base64.b64decode(line.split()[0]) for line in file.read_bytes().splitlines() if line]


def _measure(
    compiler: GrammarCompiler,
    eos: int,
    grammar: Grammar,
    text: str,
    vocabulary: Vocabulary,
    num_rows: int,
) -> dict[str, object]:
    masks = _TimedMasks(compiler, frozenset({eos}), torch.device("cpu"))
    params = SamplingParams(grammar=grammar, seed=0)
    token_ids = vocabulary.encode(text)
    output = [list(token_ids[: len(token_ids) * row // (2 * num_rows)]) for row in range(num_rows)]
    logits = torch.zeros((num_rows, compiler.vocab_size))
    apply_s = []
    for _ in range(len(token_ids) // 2):
        rows = {
            i: SamplingRow(i, params, (0,), outputs, 1 + len(outputs))
            for i, outputs in enumerate(output)
        }
        begin_s = time.perf_counter()
        failed = masks.apply(logits, rows)
        apply_s.append(time.perf_counter() - begin_s)
        assert not failed, failed
        for outputs in output:
            outputs.append(token_ids[len(outputs)])
    microseconds = 1e6 / num_rows
    return {
        "rows": num_rows,
        "steps": len(apply_s),
        "apply_us_per_row": round(statistics.median(apply_s) * microseconds, 1),
        "mask_us_per_row": round(statistics.median(masks.filled_s) * microseconds, 1),
        "mask_us_per_row_p90": round(
            statistics.quantiles(masks.filled_s, n=10)[8] * microseconds, 1
        ),
        "step_ms": round(statistics.median(apply_s) * 1e3, 2),
    }


def _rounded(begin_s: float, factor: float) -> float:
    return round((time.perf_counter() - begin_s) * factor, 2)


if __name__ == "__main__":
    main()
