"""The part of vllm_pipe that runs in vLLM's interpreter: requests come on stdin, tokens go out."""

from __future__ import annotations

import json
import os
import sys
import threading
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from shared.messages import SamplingParams
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.vllm.build import build_vllm_engine
from worker.engines.vllm.options import engine_args, set_environment
from worker.model.device import available_host_bytes

Tokens = list[tuple[int, int, bool]]  # (request, new tokens, whether they are its last)


class Host(Protocol):
    """An engine that steps."""

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> Tokens: ...

    def is_idle(self) -> bool: ...


class BareHost:
    """An LLMEngine without anything of this project's in it."""

    def __init__(self, options: EngineOptions) -> None:
        set_environment({})
        from vllm import EngineArgs, LLMEngine

        args = engine_args(options, device="cpu", free_bytes=available_host_bytes())
        self._llm = LLMEngine.from_engine_args(EngineArgs(**args))

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = VllmParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(str(number), tokens_input(prompt), params)

    def step(self) -> Tokens:
        outputs = self._llm.step()
        return [(int(o.request_id), len(o.outputs[0].token_ids), o.finished) for o in outputs]

    def is_idle(self) -> bool:
        return not self._llm.has_unfinished_requests()


class SamplerHost:
    """A VllmEngine, as the engine process has it."""

    def __init__(self, options: EngineOptions) -> None:
        self._engine = build_vllm_engine(
            options, lambda stage, share: None, lambda sentence: None
        ).engine

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add(
            EngineRequest(request_id=str(number), prompt_token_ids=tuple(prompt), params=params)
        )

    def step(self) -> Tokens:
        return [
            (int(output.request_id), len(output.token_ids), output.finish_reason is not None)
            for output in self._engine.step()
        ]

    def is_idle(self) -> bool:
        return not self._engine.has_unfinished()


HOSTS: dict[str, Any] = {"bare": BareHost, "sampler": SamplerHost}


def main() -> None:
    kind, values = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not read as tokens
    host: Host = HOSTS[kind](EngineOptions(**values))
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    out.write("ready\n")
    while True:
        try:
            while True:
                host.add(*requests.get(block=host.is_idle()))
        except Empty:
            out.write(json.dumps(host.step()) + "\n")


def _read(requests: SimpleQueue[Any]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
