"""ChunkPacer: how many prompt tokens a step may compute while other requests decode.

A step is as long as its tokens, and every stream waits for it: with a whole budget of prompt
tokens, a long prompt that comes in holds them all up for as long. The pacer learns from the steps
how long a prompt token takes, and gives each step as many as fit a target; but never fewer than a
few for each stream: if many streams make steps long by themselves, a waiting prompt would
otherwise wait for all of them to end, and steps with few tokens are inefficient.

With lookahead a step is planned before the time of the previous one is known: the measured
time of a step applies from the next but one.
"""

from __future__ import annotations

_LEAST_TOKENS = 16  # a prompt gets on, however slow the machine is
_LEAST_PER_DECODE = 8  # what prompts are to their answers where prompts are long
_NEWEST_SHARE = 0.5  # weight of the last step in the estimate: contexts grow step by step


class ChunkPacer:
    """Learns from each step, and bounds the prompt tokens of the next."""

    def __init__(self, target_s: float, most: int) -> None:
        """`target_s`: duration of a step while sequences decode; `most`: its token budget."""
        self._target_s = target_s
        self._most = most
        self._decoding_s = 0.0  # a step of the present decodes alone
        self._token_s = 0.0  # a prompt token on top of them; 0.0: not known yet

    def tokens(self, num_decodes: int) -> int:
        """Returns how many prompt tokens the next step may compute besides decodes; 1 or more."""
        least = max(_LEAST_TOKENS, _LEAST_PER_DECODE * num_decodes)
        if self._token_s == 0.0:
            return min(least, self._most)
        fitting = int((self._target_s - self._decoding_s) / self._token_s)
        return min(max(fitting, least), self._most)

    def took(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Takes a step's contents and the seconds that it took the device, or the host to get it
        computed."""
        if num_prompt_tokens == 0:
            self._decoding_s = seconds
            return
        if num_prompt_tokens < _LEAST_TOKENS:
            return  # the rest of a prompt: its time is the step's rather than the tokens'
        others_s = min(self._decoding_s, seconds / 2) if num_decodes else 0.0
        token_s = (seconds - others_s) / num_prompt_tokens
        if self._token_s == 0.0:
            self._token_s = token_s
        self._token_s += _NEWEST_SHARE * (token_s - self._token_s)
