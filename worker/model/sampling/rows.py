"""SamplingRows: the rows that a step samples, reused while the same decodes continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from worker.engine.batch import DecodeStep, ScheduledBatch
from worker.model.sampling.base import PreviousSample
from worker.model.sampling.row import SamplingRow


class SamplingRows:
    """Makes a row for each sequence once, and changes it from step to step."""

    def __init__(self) -> None:
        self._row_of: dict[int, SamplingRow] = {}
        self._decodes: list[SamplingRow] = []  # of the step `_last`
        self._index_of: dict[int, int] = {}  # of these
        self._last: DecodeStep | None = None
        self._structured: list[int] = []  # places of the decodes that have a grammar

    def of(
        self, batch: ScheduledBatch, previous: PreviousSample
    ) -> tuple[list[SamplingRow], Mapping[int, int]]:
        """Returns the rows of the sequences that are sampled from, and their places by seq_id.

        The rows hold until the next call, which may change them.
        """
        step, last = batch.decodes, self._last
        self._last = None
        if step is None:
            self._decodes, self._index_of, self._structured = [], {}, []
        elif last is not None and step.follows(last):
            self._move_on(step, last)
        else:
            self._begin(step, previous.index_of)
        self._last = step
        others = [
            SamplingRow.of(sequence, previous.index_of.get(sequence.seq_id))
            for sequence in batch.others
            if sequence.samples
        ]
        if not others:
            return self._decodes, self._index_of
        places = {row.seq_id: i for i, row in enumerate(others, len(self._decodes))}
        return [*self._decodes, *others], {**self._index_of, **places}

    def structured(self, rows: Sequence[SamplingRow]) -> list[int]:
        """Returns the places of those that have a grammar, among the rows that `of` returned."""
        others = range(len(self._decodes), len(rows))
        return [*self._structured, *(i for i in others if rows[i].params.grammar is not None)]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        for seq_id in seq_ids:
            self._row_of.pop(seq_id, None)

    def _begin(self, step: DecodeStep, places: Mapping[int, int]) -> None:
        run, row_of = step.run, self._row_of
        rows = list(map(row_of.get, run.seq_ids))
        for i, (row, sequence) in enumerate(zip(rows, run.sequences, strict=True)):
            if row is None or row.output_token_ids is not sequence.output_token_ids:
                rows[i] = row_of[sequence.seq_id] = SamplingRow(
                    sequence.seq_id,
                    sequence.params,
                    sequence.prompt_token_ids,
                    sequence.output_token_ids,
                    0,
                    tenant=sequence.tenant,
                )
        known = [row for row in rows if row is not None]  # all of them
        sampled_at = step.number + 1
        for row, start, token_id in zip(known, run.starts, step.token_ids(), strict=True):
            row.position = start + sampled_at
            row.in_flight = places.get(row.seq_id) if token_id is None else None
        self._decodes = known
        self._structured = [i for i, row in enumerate(known) if row.params.grammar is not None]
        self._index_of = dict(zip(run.seq_ids, range(len(known)), strict=True))

    def _move_on(self, step: DecodeStep, last: DecodeStep) -> None:
        for row in self._decodes:
            row.position += 1
        # From step 1 on these are their places in the sample before.
        if last.number == 0 or step.is_ahead != last.is_ahead:
            for i, row in enumerate(self._decodes):
                row.in_flight = i if step.is_ahead else None
