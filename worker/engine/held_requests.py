"""HeldRequest and Arrivals: requests in front of an engine of others, from their arrival to their
end."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.messages import ErrorCode, FinishReason
from worker.engine.config import EngineConfig
from worker.engine.errors import EngineFull, RequestRefused
from worker.engine.request import EngineOutput, EngineRequest, check_request
from worker.engine.stop import StopMatch, find_stop


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request and its output. Admission schedules it."""

    request: EngineRequest
    seq_id: int  # by arrival
    most_tokens: int  # of its output
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    priority: int = field(init=False)
    num_lane_preemptions: int = field(init=False)

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        self.num_lane_preemptions = self.request.num_lane_preemptions

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def job_id(self) -> str:
        return self.request.job_id or self.request.request_id

    def find_stop(self, eos_token_ids: Set[int]) -> StopMatch | None:
        """Returns the stop that its newest token has reached; None if the output continues."""
        return find_stop(self.output, self.request.params, eos_token_ids, self.most_tokens)

    def ended(self, stop: StopMatch) -> EngineOutput:
        """Returns its end without further tokens."""
        return EngineOutput(
            self.request.request_id,
            (),
            logprobs=None if self.request.params.logprobs is None else (),
            finish_reason=stop.reason,
            stop_reason=stop.token_id,
        )

    def failed(self, code: ErrorCode, message: str) -> EngineOutput:
        """Returns its end with an error; `message` is a sentence for the client."""
        return EngineOutput(
            self.request.request_id,
            (),
            finish_reason=FinishReason.ERROR,
            error=code,
            message=message,
            num_cached_tokens=self.num_cached_tokens,
        )


H = TypeVar("H", bound=HeldRequest)


class Arrivals(Generic[H]):
    """The live requests by id, and the ends of those that had ended when they arrived."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        make: Callable[[EngineRequest, int, int, list[int]], H],
    ) -> None:
        """`make` returns a HeldRequest of its first four fields."""
        self.live: dict[str, H] = {}
        self._config, self._vocab_size, self._make = config, vocab_size, make
        self._ended: dict[str, EngineOutput] = {}
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self.live or self._ended)

    def add(self, request: EngineRequest) -> H | None:
        """Returns the request that is live now; None if it had ended.

        Raises RequestRefused, such as EngineFull.
        """
        config = self._config
        check_request(request, config, self._vocab_size)
        request_id = request.request_id
        if request_id in self.live or request_id in self._ended:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID, f"request {request_id!r} is running already"
            )
        if len(self.live) >= config.max_num_seqs + config.max_waiting:
            raise EngineFull(config.max_waiting)
        room = config.max_model_len - len(request.prompt_token_ids)
        most_tokens = min(request.params.max_tokens, room)
        held = self._make(request, self._num_added, most_tokens, [*request.output_token_ids])
        self._num_added += 1
        # An earlier attempt may have died between its last token and the report of its end.
        if stop := held.find_stop(config.eos_token_ids):
            self.end(held, stop)
            return None
        self.live[request_id] = held
        return held

    def end(self, held: H, stop: StopMatch) -> None:
        """Records the end of a request that needs no step."""
        self.live.pop(held.request.request_id, None)
        self._ended[held.request.request_id] = held.ended(stop)

    def take_ended(self) -> list[EngineOutput]:
        """Returns the ends that were recorded, once."""
        outputs = list(self._ended.values())
        self._ended.clear()
        return outputs

    def cancel_ended(self, request_id: str) -> bool:
        """Drops the end of a request; False where it has none."""
        return self._ended.pop(request_id, None) is not None
