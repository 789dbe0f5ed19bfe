"""EngineConfig: every bound the engine works within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_STEP_TOKENS = 64  # of a prompt for which a longer sequence would fit a small cache


def least_tokens(windows: Sequence[int | None], num_tokens: int) -> int:
    """Returns the tokens of the smallest step to which a small cache may cut one of `num_tokens`:
    few where all groups have a window, as it is all the same for a sequence's length then."""
    return min(num_tokens, _LEAST_STEP_TOKENS) if None in windows else 1


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
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that requests may have
    step_target_s: float | None = None  # for steps with prompts besides decodes; None: none
    num_offload_blocks: int = 0  # copies of evicted blocks in host memory
    offload_stores_per_step: int = 256  # the most copies into it, which decodes wait for
    # The tokens that a query reaches at most, its own included, in each KV group; None: all.
    windows: tuple[int | None, ...] = (None,)  # groups with None come first

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds if no window has left any."""
        return self.num_blocks // len(self.windows) * self.block_size

    @property
    def window_group_blocks(self) -> int | None:
        """The most blocks that one sequence holds of a KV group with a window; None without one.

        They are those of the tokens before the window's end, and of the steps that are not
        committed. In a small cache the steps of a prompt are cut, for sequences of `max_model_len`
        where these fit so, else to half of the cache.
        """
        windows = [window for window in self.windows if window is not None]
        if not windows:
            return None
        tokens = self.max_num_batched_tokens
        usual, least = (
            window_blocks(max(windows), self.block_size, (1 + self.lookahead) * step)
            for step in (tokens, least_tokens(self.windows, tokens))
        )
        longest = -(-self.max_model_len // self.block_size)
        room = (self.num_blocks - longest * self.windows.count(None)) // len(windows)
        if room < least:
            room = self.num_blocks // (2 * len(windows))
        return max(least, min(usual, room))

    def held_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` holds at once."""
        num_rows = -(-num_tokens // self.block_size)
        held = self.window_group_blocks
        num_full = self.windows.count(None)
        num_windowed = len(self.windows) - num_full
        return num_full * num_rows + num_windowed * min(
            num_rows, num_rows if held is None else held
        )

    def held_tokens(self, num_tokens: int) -> int:
        """Returns the token positions of the blocks that a sequence of `num_tokens` holds."""
        if self.windows == (None,):
            return num_tokens
        return self.held_blocks(num_tokens) * self.block_size

    @property
    def sequence_capacity_tokens(self) -> int:
        """The most tokens of one sequence that the KV cache has room for."""
        held, num_full = self.window_group_blocks, self.windows.count(None)
        if held is None or held * len(self.windows) > self.num_blocks:
            return self.capacity_tokens
        if not num_full:
            return max(self.capacity_tokens, self.max_model_len)
        room = self.num_blocks - held * (len(self.windows) - num_full)
        return room // num_full * self.block_size

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_waiting",
            "offload_stores_per_step",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.windows:
            raise ValueError("windows must name at least one KV group")
        if self.num_offload_blocks and len(self.windows) > 1:
            raise ValueError("num_offload_blocks needs a single KV group")
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead must be 0 or 1, got {self.lookahead}")
        if self.step_target_s is not None and self.step_target_s <= 0:
            raise ValueError(f"step_target_s must be positive, got {self.step_target_s}")
