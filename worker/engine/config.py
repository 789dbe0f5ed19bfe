"""EngineConfig: every bound the engine works within."""

from __future__ import annotations

from dataclasses import dataclass


def window_blocks(window: int, block_size: int, num_tokens: int) -> int:
    """Returns the most blocks that hold `num_tokens` and the window before the first of them."""
    return (max(window, block_size + 1) + num_tokens + block_size - 3) // block_size + 1


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
    preempts: bool = True  # whether running sequences give their slots to others, and resume
    structured_output: bool = False  # whether the runner keeps outputs to grammars
    step_target_s: float | None = None  # for steps with prompts besides decodes; None: none
    num_offload_blocks: int = 0  # copies of evicted blocks in host memory
    window: int | None = None  # tokens that a query reaches at most, its own included; None: all

    @property
    def capacity_tokens(self) -> int:
        """Token positions in the KV cache."""
        return self.num_blocks * self.block_size

    @property
    def sequence_blocks(self) -> int | None:
        """The most blocks that one sequence holds; None: those of all its tokens.

        With a window they are those of the tokens before the window's end, and of the steps that
        are not committed. In a small cache the steps of a prompt are cut.
        """
        if self.window is None:
            return None
        steps = 1 + self.lookahead
        usual = window_blocks(self.window, self.block_size, steps * self.max_num_batched_tokens)
        least = window_blocks(self.window, self.block_size, steps)
        return max(least, min(usual, self.num_blocks))

    def held_tokens(self, num_tokens: int) -> int:
        """Returns the token positions that a sequence of `num_tokens` holds at once."""
        held = self.sequence_blocks
        return num_tokens if held is None else min(num_tokens, held * self.block_size)

    @property
    def sequence_capacity_tokens(self) -> int:
        """The most tokens of one sequence that the KV cache has room for."""
        held = self.sequence_blocks
        if held is None or held > self.num_blocks:
            return self.capacity_tokens
        return max(self.capacity_tokens, self.max_model_len)

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
