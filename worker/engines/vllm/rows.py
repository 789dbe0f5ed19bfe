"""BatchRows: the requests in the rows of vLLM's batch, with their output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from shared.messages import SamplingParams
from worker.model.sampling.row import SamplingRow


class Outputs(Sequence[int]):
    """Output tokens of earlier attempts, then vLLM's list, which grows: nothing is copied."""

    def __init__(self, known: Sequence[int], new: Sequence[int]) -> None:
        self._known = known
        self._num_known = len(known)
        self._new = new

    def __len__(self) -> int:
        return self._num_known + len(self._new)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if start >= self._num_known and step > 0:  # of the newest tokens, as samplers read them
                return self._new[start - self._num_known : stop - self._num_known : step]
            return [*self._known, *self._new][index]
        place = range(len(self))[index]
        if place < self._num_known:
            return self._known[place]
        return self._new[place - self._num_known]


@dataclass(slots=True, eq=False)
class BatchRow:
    """A request in vLLM's batch, and its row as the sampler reads it."""

    sampling: SamplingRow
    new: Sequence[int]  # vLLM's list of output tokens
    num_known: int  # output tokens of earlier attempts, which vLLM takes for prompt
    plain_from: int | None  # outputs from which on its token is the largest logit; None: never
    num_drawn: int = 0  # outputs that the sampler has seen

    @classmethod
    def of(
        cls,
        seq_id: int,
        params: SamplingParams,
        num_prompt_tokens: int,
        tenant: str,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> BatchRow:
        """Returns a row. `prompt` is vLLM's: after `num_prompt_tokens` come earlier outputs."""
        known = prompt[num_prompt_tokens:]
        row = SamplingRow(
            seq_id=seq_id,
            params=params,
            prompt_token_ids=prompt[:num_prompt_tokens],
            output_token_ids=Outputs(known, output) if known else output,
            position=len(prompt) + len(output),
            tenant=tenant,
        )
        later = SamplingRow(seq_id, params, (), (), position=params.min_tokens)
        plain_from = params.min_tokens if later.is_plain_greedy else None
        return cls(row, output, len(known), plain_from)

    @property
    def is_plain(self) -> bool:
        """The largest logit is its token, now and later."""
        return self.plain_from is not None and self.num_outputs >= self.plain_from

    @property
    def num_outputs(self) -> int:
        return self.num_known + len(self.new)

    def advance(self) -> bool:
        """Moves the sampler's row on to vLLM's list; returns False if that has become shorter.

        Raises RuntimeError for a token that vLLM has sampled and not filled in.
        """
        if self.new and self.new[-1] < 0:
            raise RuntimeError("vLLM samples a token before the previous one is known")
        num_outputs = self.num_outputs
        self.sampling.position = len(self.sampling.prompt_token_ids) + num_outputs
        has_grown = num_outputs >= self.num_drawn
        self.num_drawn = num_outputs
        return has_grown


class BatchRows:
    """Follows vLLM's batch: row numbers to requests, through removals, additions and moves.

    A request that leaves the batch is kept for a while, with the sampler's state: vLLM does not
    report whether it has ended or was preempted and will come back.
    """

    def __init__(self, max_left: int) -> None:
        """At most `max_left` of those that left are kept."""
        self._max_left = max_left
        self._rows: dict[int, BatchRow] = {}
        self._left: OrderedDict[int, BatchRow] = OrderedDict()  # by seq_id, the oldest first

    def remove(self, index: int) -> None:
        """Notes that a row is empty now; one that was empty is fine."""
        row = self._rows.pop(index, None)
        if row is not None:
            self._left[row.sampling.seq_id] = row

    def add(self, index: int, row: BatchRow | None) -> None:
        """Puts a request into a row and replaces the one there; None: one without a sampler's row.

        A request that comes back may have another list of outputs.
        """
        self.remove(index)
        if row is None:
            return
        before = self._left.pop(row.sampling.seq_id, None)
        if before is not None:
            row.num_drawn = before.num_drawn
        self._rows[index] = row

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Moves the request at `source` to `target`, whose request moves to `source` or leaves."""
        moved = self._rows.pop(source, None)
        if swap and target in self._rows:
            self._rows[source] = self._rows.pop(target)
        self.remove(target)
        if moved is not None:
            self._rows[target] = moved

    def forgotten(self) -> list[int]:
        """Returns the seq_ids of those that left long ago; they are no longer kept."""
        gone = []
        while len(self._left) > self._max_left:
            gone.append(self._left.popitem(last=False)[0])
        return gone

    def present(self) -> list[tuple[int, BatchRow]]:
        """Returns the requests in the batch with their rows, the first row first."""
        return sorted(self._rows.items(), key=lambda item: item[0])
