"""LoRA adapters in vLLM, which loads one when a request asks for it and has room for some.

vLLM loads it within a step, where an error ends the engine. So each is loaded before its request
enters, and once at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm import LLMEngine
from vllm.lora.request import LoRARequest

from worker.engines.vllm.load_errors import sentence_of
from worker.lora import Adapter
from worker.model.errors import CheckpointError

log = logging.getLogger(__name__)


def add_adapters(llm: LLMEngine, adapters: Mapping[str, Adapter]) -> dict[str, LoRARequest]:
    """Returns vLLM's form of these adapters, each loaded once. Raises CheckpointError for one that
    does not fit the model."""
    requests = {
        adapter.name: LoRARequest(adapter.name, number, str(adapter.path))
        for number, adapter in enumerate(adapters.values(), start=1)
    }
    for request in requests.values():
        try:
            llm.add_lora(request)
        except Exception as error:  # of any reader of files, and of any process of vLLM's
            raise CheckpointError(
                f"PENSTOCK_LORA_MODULES: {_not_loaded(request, error)}"
            ) from error
    return requests


def load_adapter(llm: LLMEngine, adapter: LoRARequest) -> str:
    """Loads an adapter that is not loaded; without room vLLM drops the one used least recently.
    Returns why it cannot be loaded; empty: it is loaded."""
    try:
        llm.add_lora(adapter)
    except Exception as error:  # of any reader of files, and of any process of vLLM's
        log.warning(
            "an adapter cannot be loaded",
            extra={"adapter": adapter.lora_name, "error": sentence_of(error)},
        )
        return _not_loaded(adapter, error)
    return ""


def _not_loaded(adapter: LoRARequest, error: Exception) -> str:
    return f"vLLM cannot load the adapter {adapter.lora_name!r}: {sentence_of(error)}"
