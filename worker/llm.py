"""LLM: the engine without a queue. A list of prompts in, a list of results out, in this process.

    llm = LLM("path/to/checkpoint")
    for result in llm.generate(["Once upon"], SamplingParams(max_tokens=64)):
        ...

Engine, model, tokenizer and the way tokens become text are the ones that the service uses. From a
shell: python -m worker.llm --help
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.cores import wait_asleep
from shared.messages import (
    MAX_CHOICES,
    ErrorCode,
    FinishReason,
    InvalidParameter,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)
from shared.text.base import TextInvalid, Tokenizer
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.text_model import load_card_tokenizer
from worker.checkpoint import CheckpointNotFound, find_checkpoint
from worker.engine.engine import Engine
from worker.engine.errors import EngineFull, RequestRefused
from worker.engine.request import EngineOutput, EngineRequest, EngineStats
from worker.engine_options import EngineOptions
from worker.job_runner import choice_seed
from worker.model.errors import ModelError
from worker.output import OutputChunk, OutputProcessor

Prompt = str | Sequence[int]

# Fields of EngineOptions.
NOT_OF_LLM = {
    "checkpoint",
    "runner",
    "echo_step_ms",
    "engine",
    "engine_python",
    "vllm_args",
    "vllm_sampler",
}

# Reported at a shell as one line: the message alone explains the error.
_EXPECTED = (CheckpointNotFound, InvalidParameter, ModelError, OSError, RequestRefused, TextInvalid)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """The result of one prompt. With an `error` the text is the output until then."""

    text: str  # without the stop string, EOS or stop token that ended it
    token_ids: tuple[int, ...]  # with the tokens that ended it
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or token id that matched; None for EOS
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None
    error: ErrorCode | None = None
    message: str = ""
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None  # of all its tokens but the first


class LLM:
    """One model, ready to generate. Not safe for several threads.

    `model` is a checkpoint directory, a hub id or '' for the demo model; the options are the fields
    of EngineOptions. Raises TypeError naming an unknown option, InvalidParameter (a ValueError)
    naming one with an invalid value, and CheckpointNotFound, TextInvalid or ModelError with a
    sentence.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Raises TypeError and InvalidParameter before anything is loaded; see the class."""
        wait_asleep(os.environ)
        # Here and not above: torch comes with it, and `from_parts` does without.
        from worker.model.build import build_model

        known = {option.name for option in fields(EngineOptions)} - NOT_OF_LLM
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(
                f"LLM has no option {', '.join(map(repr, unknown))}; "
                f"there are: {', '.join(sorted(known))}"
            )
        chosen = EngineOptions(checkpoint="", **options)
        checkpoint = find_checkpoint(model, "")
        built = build_model(replace(chosen, checkpoint=str(checkpoint.path)))
        card, blobs = card_from_checkpoint(
            checkpoint.path,
            name=checkpoint.name,
            max_model_len=built.engine_config.max_model_len,
            kv_capacity_tokens=built.engine_config.sequence_capacity_tokens,
            dtype=built.dtype,
            num_parameters=built.num_parameters,
        )
        self._engine = Engine(built.engine_config, built.runner, disk=built.disk)
        self._ends = weakref.finalize(self, built.close)
        self._tokenizer: Tokenizer = load_card_tokenizer(card, blobs)

    @classmethod
    def from_parts(cls, engine: Engine, tokenizer: Tokenizer) -> LLM:
        """Returns an LLM of parts made elsewhere; the engine is then the LLM's alone."""
        llm = cls.__new__(cls)
        llm._engine = engine
        llm._tokenizer = tokenizer
        llm._ends = weakref.finalize(llm, _nothing)
        return llm

    def close(self) -> None:
        """Ends other ranks and the writes of KV blocks, and frees the memory of the model, its KV
        cache and their copies. Idempotent; the end of the LLM or of the process does it too."""
        vars(self).pop("_engine", None)
        self._ends()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        n: int = 1,
    ) -> list[OfflineResult]:
        """Returns results in the order of the prompts, each a text or a list of token ids.

        `sampling_params` holds for all prompts, or is a sequence with one for each; a seed of None
        is drawn for each prompt. With `n` each prompt has that many results in a row: as the
        choices of a job, with seeds mixed from the prompt's (see choice_seed) and the prompt
        computed once. Before anything runs, raises RequestRefused for a prompt that could never
        run, InvalidParameter for `n`, and TypeError or ValueError for arguments that do not fit
        each other, and RuntimeError after `close`. Later errors are in the results.
        """
        if not self._ends.alive:
            raise RuntimeError("this LLM is closed: make another one")
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidParameter("n", f"must be between 1 and {MAX_CHOICES}, got {n}")
        requests = self._requests(prompts, _params_for(prompts, sampling_params), n)
        for i, request in enumerate(requests):
            try:
                self._engine.check(request)
            except RequestRefused as refusal:
                message = f"prompt {i // n}: {refusal.message}"
                raise RequestRefused(refusal.code, message) from None
        live = [
            _Generation(request, OutputProcessor(self._tokenizer, request.params))
            for request in requests
        ]
        bar = GenerationProgress(len(live), self._engine.stats(), shown=progress)
        try:
            self._run(live, n, bar)
        finally:
            bar.close()
            self._clear(requests)
        results = [generation.result() for generation in live]
        # A prompt is scored for its first choice.
        return [
            replace(result, prompt_logprobs=results[at - at % n].prompt_logprobs)
            for at, result in enumerate(results)
        ]

    def _requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], n: int
    ) -> list[EngineRequest]:
        requests = []
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if sampling.seed is None:
                sampling = replace(sampling, seed=secrets.randbits(63))
            requests += [
                EngineRequest(
                    request_id=f"prompt-{i}/{choice}",
                    prompt_token_ids=tuple(token_ids),
                    params=replace(sampling, seed=choice_seed(sampling.seed, choice)),
                    scores_prompt=choice == 0,
                )
                for choice in range(n)
            ]
        return requests

    def _run(self, generations: Sequence[_Generation], n: int, bar: GenerationProgress) -> None:
        engine = self._engine
        pending = deque(generations[::n])
        # The other choices of a prompt follow when it has been computed for the first.
        others = {
            first.request.request_id: generations[at * n + 1 : (at + 1) * n]
            for at, first in enumerate(generations[::n])
        }
        by_id = {generation.request.request_id: generation for generation in generations}
        while pending or engine.has_unfinished():
            while pending:
                try:
                    engine.add(pending[0].request)
                except EngineFull:
                    break
                pending.popleft()
            for output in engine.step():
                generation = by_id[output.request_id]
                generation.take(output)
                if output.prompt_logprobs:
                    continue
                pending.extendleft(reversed(others.pop(output.request_id, ())))
                if generation.is_over:
                    bar.finished(1)
                    # Without effect unless a stop string was found: the engine cannot see those.
                    engine.cancel(output.request_id)
            bar.stepped(engine.stats())

    def _clear(self, requests: Iterable[EngineRequest]) -> None:
        """Removes everything of this call from the engine, after an interruption."""
        for request in requests:
            self._engine.cancel(request.request_id)
        while self._engine.has_unfinished():
            self._engine.step()


def _nothing() -> None:
    """Closes parts that their maker closes."""


@dataclass(eq=False)
class _Generation:
    """One prompt on its way."""

    request: EngineRequest
    processor: OutputProcessor
    pieces: list[OutputChunk] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].finish_reason is not None

    def take(self, output: EngineOutput) -> None:
        """Takes an output of the request; none follows the one with its end."""
        self.prompt_logprobs += output.prompt_logprobs
        if output.prompt_logprobs:
            return
        self.last = output
        if output.error is not None:
            piece = OutputChunk((), self.processor.abort(), finish_reason=FinishReason.ERROR)
        else:
            piece = self.processor.push(
                output.token_ids, output.logprobs, output.finish_reason, output.stop_reason
            )
        self.pieces.append(piece)

    def result(self) -> OfflineResult:
        """Returns the generated output; the request has ended."""
        assert self.last is not None, "a request ends with an output"
        end = self.pieces[-1]
        assert end.finish_reason is not None
        wants_logprobs = self.request.params.logprobs is not None
        return OfflineResult(
            text="".join(piece.text for piece in self.pieces),
            token_ids=tuple(token_id for piece in self.pieces for token_id in piece.token_ids),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.last.num_cached_tokens,
            logprobs=tuple(entry for piece in self.pieces for entry in piece.logprobs or ())
            if wants_logprobs
            else None,
            error=self.last.error,
            message=self.last.message,
            prompt_logprobs=None
            if self.request.params.prompt_logprobs is None
            else tuple(self.prompt_logprobs),
        )


def _params_for(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if isinstance(prompts, str):
        raise TypeError("prompts is a list: put a single prompt into one")
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(given)} sampling params")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.llm",
        description="Generate text for prompts with a model in this process: no server, no Redis.",
    )
    parser.add_argument("--model", default="", help="directory or hub id; default: the demo model")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--file", help="one prompt a line, empty lines skipped; - is standard input"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--load-format", help="auto, or dummy for random weights")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--n", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--stop", action="append", help="a stop string; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    return parser


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """Raises OSError, and InvalidParameter for a file that is not UTF-8."""
    prompts = list(arguments.prompt)
    try:
        if arguments.file == "-":
            prompts += sys.stdin.read().splitlines()
        elif arguments.file is not None:
            prompts += Path(arguments.file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidParameter("--file", f"{arguments.file} is not UTF-8: {error}") from None
    return [prompt for prompt in prompts if prompt]


def _chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the texts, or JSON lines. Returns 0, 1 if a prompt failed, 2 for usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        prompts = _prompts(arguments)
        if not prompts:
            parser.error("no prompt: give --prompt or --file")
        params = _chosen(
            arguments, "max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"
        )
        sampling = SamplingParams(**params, stop=tuple(arguments.stop or ()))
        options = _chosen(arguments, "dtype", "device", "load_format")
        with LLM(arguments.model, **options) as llm:
            progress = not arguments.no_progress
            results = llm.generate(prompts, sampling, progress=progress, n=arguments.n)
    except _EXPECTED as error:
        parser.error(str(error))
    for i, result in enumerate(results):
        prompt = prompts[i // arguments.n]
        _print(prompt, result, as_json=arguments.json)
    return 1 if any(result.error for result in results) else 0


def _print(prompt: str, result: OfflineResult, *, as_json: bool) -> None:
    if as_json:
        members: Mapping[str, Any] = {"prompt": prompt, **asdict(result)}
        print(json.dumps(members, ensure_ascii=False))  # noqa: T201
        return
    print(result.text)  # noqa: T201
    if result.error is not None:
        print(f"error: {result.error}: {result.message}", file=sys.stderr)  # noqa: T201


RATE_INTERVAL_S = 0.5  # rates are averages over at least this long


class GenerationProgress:
    """A progress bar of finished prompts, with prefill and decode rates in tokens per second.

    Writes to stderr, and only while that is a terminal: a file gets no control characters.
    """

    def __init__(self, num_prompts: int, stats: EngineStats, *, shown: bool) -> None:
        self._bar = tqdm(
            total=num_prompts,
            desc="generate",
            unit=" prompts",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=None if shown else True,
        )
        self._seen = stats
        self._seen_at_s = time.monotonic()

    def finished(self, num_prompts: int) -> None:
        self._bar.update(num_prompts)

    def stepped(self, stats: EngineStats) -> None:
        elapsed_s = time.monotonic() - self._seen_at_s
        if elapsed_s < RATE_INTERVAL_S:
            return
        self._bar.set_postfix_str(rates(self._seen, stats, elapsed_s))
        self._seen = stats
        self._seen_at_s += elapsed_s

    def close(self) -> None:
        self._bar.close()


def rates(before: EngineStats, after: EngineStats, elapsed_s: float) -> str:
    prefill = (after.prompt_tokens - before.prompt_tokens) / elapsed_s
    decode = (after.generated_tokens - before.generated_tokens) / elapsed_s
    return f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s"


if __name__ == "__main__":
    sys.exit(main())
