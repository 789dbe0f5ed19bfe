"""Parts of a frontend that only some requests need, loaded by name.

A reader of an ordinary request need not read them. `preload` imports all of them before a frontend
serves, so that the first request that needs one does not hold the event loop for an import.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

PARTS: Mapping[str, str] = {
    # reasoning and tool calls in a model's text
    "format_parser": "api.output_parsers.format_parser",
    "formats": "api.output_parsers.formats",
    "harmony": "api.output_parsers.harmony",
    "json_lists": "api.output_parsers.json_lists",
    "named_calls": "api.output_parsers.named_calls",
    "pythonic": "api.output_parsers.pythonic",
    "xml_calls": "api.output_parsers.xml_calls",
    # earlier tool calls in a prompt, and the schemas of tools whose format leaves types out
    "history": "api.generation.history",
    "parameters": "api.generation.parameters",
    # structured output, enforced tool calls, budgets of reasoning
    "grammars": "api.generation.grammars",
    "efforts": "api.generation.efforts",
    # answers that continue the last message
    "continued": "api.generation.continued",
    # requests that are invalid
    "validation_errors": "api.generation.validation_errors",
    "refused_parameters": "api.generation.refused_parameters",
    # log probabilities of the output and the prompt; where each token's text is, to count reasoning
    "logprobs": "api.generation.logprobs",
    "aligned_choices": "api.generation.aligned_choices",
    # limits of a tenant's rate; durability
    "response_headers": "api.http.response_headers",
    # `return_metrics`
    "timing_metrics": "api.generation.timing_metrics",
    # compressed bodies; idempotency keys; several prompts in one request; events of several steps
    "idempotency": "api.jobs.idempotency",
    "body_coding": "api.http.body_coding",
    "merged_stream": "api.jobs.merged_stream",
    "batched_deltas": "api.jobs.batched_deltas",
    # streams of several choices, or whose text is held back for a while
    "sent_choices": "api.jobs.sent_choices",
    # `store` and `expires_after`
    "retention": "api.jobs.retention",
    # sentences and examples of the OpenAPI document
    "reference": "api.reference.describe",
    "request_schemas": "api.generation.request_schemas",
    # the end of a job that Redis has lost
    "missing_end": "api.jobs.missing_end",
    # events of lost workers
    "recoveries": "api.jobs.recoveries",
}


def load_part(name: str) -> Any:
    """Returns the module of a part. Raises KeyError for an unknown name."""
    return importlib.import_module(PARTS[name])


def preload() -> None:
    """Imports every part."""
    for name in PARTS:
        load_part(name)
