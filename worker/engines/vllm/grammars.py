"""Bounds on the grammars that vLLM's own sampler follows: those of worker.model.sampling.

vLLM makes masks inside its step, with only the library's limits, and reports no row that cannot be
continued: it ends with the token that was drawn. Here a grammar that exceeds its budget is
noted, and the engine ends its request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    serialize_guidance_grammar,
)

from shared.text.grammar_compiler import (
    FIRST_CPU_SECONDS,
    MASK_CPU_SECONDS,
    RUN_LIMITS,
    TOO_SLOW,
    matcher_error,
)
from worker.engines.vllm.vllm_compat import scheduler_of, use_guidance_backend

if TYPE_CHECKING:
    from vllm import LLMEngine


class BoundedGrammar(GuidanceGrammar):
    """A grammar of one request that counts the processor time of its masks."""

    num_masks = 0
    cpu_s = 0.0
    charged_s = 0.0  # of it

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        begun_s = time.thread_time()
        super().fill_bitmask(bitmask, idx)
        self.cpu_s += time.thread_time() - begun_s
        self.num_masks += 1

    def take_cpu_s(self) -> float:
        """Returns the processor seconds since the last call."""
        taken_s = self.cpu_s - self.charged_s
        self.charged_s = self.cpu_s
        return taken_s

    @property
    def failure(self) -> str:
        """Returns why it cannot be followed any further; empty: it can."""
        if self.ll_matcher.is_error():
            return matcher_error(self.ll_matcher)
        allowed_s = FIRST_CPU_SECONDS + MASK_CPU_SECONDS * self.num_masks
        return TOO_SLOW if self.cpu_s > allowed_s else ""


class BoundedBackend(GuidanceBackend):
    """Compiles grammars within RUN_LIMITS."""

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> BoundedGrammar:
        text = serialize_guidance_grammar(
            request_type,
            grammar_spec,
            self.disable_any_whitespace,
            self.disable_additional_properties,
        )
        matcher = LLMatcher(self.ll_tokenizer, text, log_level=0, limits=RUN_LIMITS)
        return BoundedGrammar(matcher, self.ll_tokenizer, self.vocab_size)


def bound_grammars() -> None:
    """Has vLLM use these from its first grammar on."""
    use_guidance_backend(BoundedBackend)


def bounded_grammar(llm: LLMEngine, vllm_id: str) -> BoundedGrammar | None:
    """Returns the grammar of a request inside vLLM; None without one, or before it is compiled."""
    request = scheduler_of(llm).requests.get(vllm_id)
    structured = request.structured_output_request if request is not None else None
    grammar = structured.grammar if structured is not None else None
    return grammar if isinstance(grammar, BoundedGrammar) else None
