"""Sequence: one growing list of tokens and how far its KV has been computed.

    token_ids    p p p p p p p p p o o o .          p prompt, o output, . sampled on the device,
                 |- computed -|- s -|                   not yet seen here (`in_flight`)

`num_computed_tokens` have their KV written and committed; the next `num_scheduled_tokens` belong to
launched steps that are not committed yet. A sequence needs computing until both together reach
`num_virtual_tokens`: prefill and decode differ only in how many tokens are missing.
"""

from __future__ import annotations

from collections.abc import Set
from enum import StrEnum

from shared.messages import SamplingParams
from worker.engine.block_hash import BlockHash
from worker.engine.request import EngineRequest
from worker.engine.stop import StopMatch, find_stop


class SequenceStatus(StrEnum):
    """WAITING -> RUNNING <-> PREEMPTED; every one of them -> FINISHED, once."""

    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds blocks
    PREEMPTED = "preempted"  # ran, lost its blocks, kept its tokens, waits again
    FINISHED = "finished"


QUEUED_STATUSES = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})


class Sequence:
    """One request inside the engine. Compared by identity.

    The Scheduler changes the status and the counters, the BlockManager the blocks, `append` the
    tokens. `block_table` only ever grows; when the blocks are released the sequence gets a new
    list, so a launched batch may still read the old one.
    """

    __slots__ = (
        "arrived_s",
        "begun_s",
        "block_hashes",
        "block_table",
        "first_token_s",
        "in_flight",
        "is_held",
        "job_id",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_prompt_tokens",
        "num_lane_preemptions",
        "num_passed_tokens",
        "num_preemptions",
        "num_published_blocks",
        "num_scheduled_tokens",
        "num_scored_tokens",
        "output_token_ids",
        "params",
        "prefix_digests",
        "priority",
        "prompt_token_ids",
        "request_id",
        "seq_id",
        "spare_blocks",
        "status",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        max_model_len: int,
        output_token_ids: tuple[int, ...] = (),
        tenant: str = "default",
        job_id: str = "",
        priority: int = 0,
        num_lane_preemptions: int = 0,
        scores_prompt: bool = False,
        arrived_s: float = 0.0,
    ) -> None:
        """`job_id`: sequences that share it are choices of one job; empty: it is a job alone.

        `scores_prompt`: the log probabilities of its prompt are wanted.
        """
        self.seq_id = seq_id
        self.job_id = job_id or request_id
        self.request_id = request_id
        self.tenant = tenant
        self.priority = priority
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = list(output_token_ids)
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        # What max_tokens and the model's context leave together.
        self.max_num_tokens = min(len(prompt_token_ids) + params.max_tokens, max_model_len)
        self.status = SequenceStatus.WAITING
        self.arrived_s = arrived_s  # by the engine's clock, as are the next two
        self.begun_s: float | None = None  # when it was first in a step
        self.first_token_s: float | None = None
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.in_flight = 0
        self.is_held = False  # skips steps until its mask is ready
        self.num_preemptions = 0
        self.num_lane_preemptions = num_lane_preemptions
        self.num_cached_tokens = 0  # of the prompt, got by the first admission's prefix hit
        # Prompt tokens whose log probabilities are known or not requested; the first has none.
        self.num_scored_tokens = 1 if scores_prompt else len(prompt_token_ids)
        self.num_counted_prompt_tokens = 0  # already in the engine's statistics
        self.block_table: list[int] = []  # in order of the tokens, of each KV group a block in turn
        self.spare_blocks: list[int] = []  # which the table gets next, of groups without a window
        self.block_hashes: list[BlockHash] = []  # of its full blocks, as far as computed
        self.prefix_digests: list[bytes] = []  # likewise, one for each PREFIX_STEP tokens
        self.num_published_blocks = 0  # of each KV group
        self.num_passed_tokens = 0  # computed ones when it last gave up blocks before its windows

    @classmethod
    def of(
        cls, request: EngineRequest, seq_id: int, max_model_len: int, arrived_s: float
    ) -> Sequence:
        """Returns a request as a sequence that never ran."""
        return cls(
            seq_id=seq_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            max_model_len=max_model_len,
            output_token_ids=request.output_token_ids,
            tenant=request.tenant,
            job_id=request.job_id,
            priority=request.priority,
            num_lane_preemptions=request.num_lane_preemptions,
            scores_prompt=request.scores_prompt and request.params.prompt_logprobs is not None,
            arrived_s=arrived_s,
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}+{self.num_scheduled_tokens}, "
            f"in_flight={self.in_flight}, blocks={len(self.block_table)})"
        )

    @property
    def num_tokens(self) -> int:
        """All known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_virtual_tokens(self) -> int:
        """Known tokens and those that launched steps have sampled or will sample."""
        return len(self.token_ids) + self.in_flight

    @property
    def next_position(self) -> int:
        """The first position that no step has been launched for."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that a step could compute now; more than one means that it is prefilling."""
        return self.num_virtual_tokens - self.next_position

    @property
    def samples_nothing(self) -> bool:
        """Its prompt alone is computed."""
        return self.params.max_tokens == 0

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that a prefix hit may skip. The last token must be computed, or there are
        no logits, and so must the token before the next log probability of the prompt."""
        if self.num_scored_tokens < self.num_prompt_tokens:
            return self.num_scored_tokens - 1
        return self.num_tokens - 1

    def scores_between(self, start: int, end: int) -> range:
        """Returns the prompt positions whose log probabilities computing [start, end) gives."""
        positions = range(
            max(start + 1, self.num_scored_tokens), min(end + 1, self.num_prompt_tokens)
        )
        return positions or range(0)

    @property
    def is_complete_in_flight(self) -> bool:
        """Its last possible token is being sampled: nothing is left to launch."""
        if self.samples_nothing:
            return self.num_missing_tokens == 0
        return self.num_virtual_tokens >= self.max_num_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def find_stop(self, eos_token_ids: Set[int]) -> StopMatch | None:
        """Returns the stop that its newest token has reached. Call it after every token."""
        max_output_tokens = self.max_num_tokens - len(self.prompt_token_ids)
        return find_stop(self.output_token_ids, self.params, eos_token_ids, max_output_tokens)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
