"""EngineConfig: every bound the engine works within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError for values that cannot work together."""

    num_blocks: int  # KV blocks in the pool
    block_size: int = 16  # token places in a block
    max_num_seqs: int = 32  # sequences running at once
    max_num_batched_tokens: int = 512  # token budget of one step
    max_model_len: int = 4096  # prompt and output tokens of one sequence
    max_waiting: int = 1024  # sequences waiting in the engine
    prefix_caching: bool = True
    lookahead: int = 0  # steps launched before the previous one is collected
    policy: str = "fcfs"
    eos_token_ids: frozenset[int] = frozenset()
    structured_output: bool = False  # whether the runner keeps outputs to grammars
    step_target_s: float | None = None  # for steps with prompts besides decodes; None: none

    @property
    def capacity_tokens(self) -> int:
        """Token positions in the KV cache."""
        return self.num_blocks * self.block_size

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead must be 0 or 1, got {self.lookahead}")
        if self.step_target_s is not None and self.step_target_s <= 0:
            raise ValueError(f"step_target_s must be positive, got {self.step_target_s}")
