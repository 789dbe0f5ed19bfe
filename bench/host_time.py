"""Host milliseconds of the engine's steps with the model taken out, as JSON lines and a table.

    python -m bench.host_time
    python -m bench.host_time --device cuda --seqs 256 --steps 400
    python -m bench.host_time --ranks --seqs 256 --context 1024 8192 --kinds greedy

This is what a GPU has to hide: a step of the real Engine, Scheduler, ForwardBatch and runner, over
a stack and a sampler that return tensors made before. Processor time of the thread, medians over
the steps, so that a busy machine shows less. Needs torch, numpy and xxhash.

    schedule   Scheduler.schedule
    build      ForwardBatch.build: the batch as tensors on the device
    glue       the rest of the runner's launch, rows to sample from included
    collect    StepHandle.collect: the tokens as Python numbers
    commit     Scheduler.commit
    outputs    the rest of Engine.step: stops, outputs, counts; structured rows drawn later

and with `--ranks`, as of a model that is divided over two devices:

    send       a step as bytes for rank 1
    rank 1     the step from these bytes, and the batch as tensors there
    bytes      in a step

In a `steady` run all sequences decode. In a `changing` one a sequence ends and one comes in at
every step, whose prompt is computed beside the decodes.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from bench.machine import cpu_name
from shared.messages import Grammar, GrammarKind, SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.ports import StepHandle
from worker.engine.request import EngineRequest
from worker.model.sampling.sampler import Sampled
from worker.model.step.forward_batch import ForwardBatch
from worker.model.step.rank_forward import RankForward
from worker.model.step.runner import TorchModelRunner

VOCAB_SIZE = 151_936
BLOCK_SIZE = 16
CONTEXT = 64  # tokens of a prompt
MAX_TOKENS = 4096
PARTS = ("schedule", "build", "glue", "collect", "commit", "outputs")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
STRUCTURED: dict[str, Any] = {**GREEDY, "grammar": Grammar(GrammarKind.REGEX, "a+")}  # no masks
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "structured": STRUCTURED}


class StubSampler:
    """Chooses token 7 for every row."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._token_ids = torch.full((most,), 7, dtype=torch.int64, device=device)
        self._best = torch.zeros(most, device=device)

    def sample(self, logits: torch.Tensor, rows: Any, previous: torch.Tensor) -> Sampled:
        return Sampled(self._token_ids[: len(rows)], self._best[: len(rows)], None)

    def forget(self, seq_ids: Any) -> None:
        pass


@dataclass
class Watch:
    """Processor seconds of this thread by part, of one step."""

    spent: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time added to the part `name`."""

        def timed(*args: Any, **options: Any) -> Any:
            begin_s = time.thread_time()
            result = function(*args, **options)
            self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - begin_s
            return result

        return timed

    def launching(self, launch: Callable[..., StepHandle]) -> Callable[..., Any]:
        """Returns the runner's `launch`, whose handle's `collect` is a part as well."""
        timed = self.timed("launch", launch)

        def launching(batch: Any) -> Any:
            handle = timed(batch)
            return SimpleNamespace(
                sample_structured=handle.sample_structured,
                collect=self.timed("collect", handle.collect),
            )

        return launching

    def parts(self, whole_s: float) -> dict[str, float]:
        """Returns the parts of a step that took `whole_s`, and forgets them."""
        spent, self.spent = self.spent, {}
        launch = spent.pop("launch", 0.0)
        parts = {name: spent.get(name, 0.0) for name in PARTS}
        parts["glue"] = launch - parts["build"]
        others = parts["schedule"] + launch + parts["collect"] + parts["commit"]
        parts["outputs"] = whole_s - others
        return parts


class StubRank:
    """Rank 1 in this thread: it computes nothing of the steps that it gets."""

    def __init__(self, model: Any, stack: Any, num_seqs: int) -> None:
        # Here, for machines without msgspec.
        from worker.model.parallel import messages

        self._messages = messages
        self._encoder, self._decoder = messages.StepEncoder(), messages.StepDecoder()
        self._forward = RankForward(
            model, stack, block_size=BLOCK_SIZE, max_num_seqs=num_seqs, shares_tokens=False
        )
        self._sent: list[bytes] = []
        self._send_s = 0.0

    def send(self, batch: ScheduledBatch) -> None:
        begin_s = time.thread_time()
        self._sent.append(self._messages.encode(self._encoder.encode(batch)))
        self._send_s += time.thread_time() - begin_s

    def run(self) -> dict[str, float]:
        """Computes the steps that were sent; returns its parts of them, and the bytes."""
        sent, self._sent = self._sent, []
        send_s, self._send_s = self._send_s, 0.0
        begin_s = time.thread_time()
        for body in sent:
            step = self._messages.decode_step(body)
            self._forward.run(self._decoder.decode(step), step.sampled)
        run_s = time.thread_time() - begin_s
        return {"send": send_s, "rank 1": run_s, "bytes": sum(map(len, sent)) / 1e3}


def make_engine(
    num_seqs: int, lookahead: int, device: torch.device, *, context: int, has_ranks: bool
) -> tuple[Engine, StubRank | None]:
    """Returns an engine over a runner whose stack and sampler compute nothing, and its rank 1."""
    placement = SimpleNamespace(device=device)
    config = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({1}))
    model: Any = SimpleNamespace(config=config, placement=placement, logits=lambda hidden: hidden)
    hidden = torch.zeros(1, device=device)

    def stack(token_ids: Any, positions: Any, metadata: Any, rows: Any) -> torch.Tensor:
        return hidden

    rank = StubRank(model, stack, num_seqs) if has_ranks else None
    runner = TorchModelRunner(
        model,
        stack,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        ranks=rank,  # type: ignore[arg-type]
    )
    runner._sampler = StubSampler(num_seqs, device)  # type: ignore[assignment]
    engine = Engine(
        EngineConfig(
            num_blocks=num_seqs * (128 + context // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=context + MAX_TOKENS,
            lookahead=lookahead,
            eos_token_ids=frozenset({1}),
            structured_output=True,
        ),
        runner,
    )
    return engine, rank


def requests(
    params: dict[str, Any], max_tokens: Iterator[int], context: int
) -> Iterator[EngineRequest]:
    """Yields requests that have nothing in common."""
    for i in itertools.count():
        prompt = tuple((7919 * i + 31 * t) % 150_000 + 2 for t in range(context))
        yield EngineRequest(
            request_id=f"job-{i}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=next(max_tokens), ignore_eos=True, **params),
        )


def measure(
    num_seqs: int,
    params: dict[str, Any],
    *,
    steps: int,
    lookahead: int,
    device: torch.device,
    is_changing: bool,
    context: int = CONTEXT,
    has_ranks: bool = False,
    profile: cProfile.Profile | None = None,
) -> dict[str, float]:
    """Returns the medians in milliseconds, `step` and its parts, and with ranks the bytes sent."""
    engine, rank = make_engine(num_seqs, lookahead, device, context=context, has_ranks=has_ranks)
    limits: Iterator[int] = itertools.repeat(MAX_TOKENS - CONTEXT)
    if is_changing:  # one of them ends at each step, and those that come in live as long
        limits = itertools.chain(range(8, num_seqs + 8), itertools.repeat(num_seqs))
    coming = requests(params, limits, context)
    for request in itertools.islice(coming, num_seqs):
        engine.add(request)
    while engine.stats().active < num_seqs:
        engine.step()
        if rank is not None:
            rank.run()
    watch = Watch()
    scheduler, runner, build = engine._scheduler, engine._runner, ForwardBatch.build
    replace(scheduler, "schedule", watch.timed("schedule", scheduler.schedule))
    replace(scheduler, "commit", watch.timed("commit", scheduler.commit))
    replace(runner, "launch", watch.launching(runner.launch))
    replace(ForwardBatch, "build", watch.timed("build", build))
    times: dict[str, list[float]] = {}
    try:
        for number in range(-16, steps):
            if is_changing:
                engine.add(next(coming))
            if profile is not None and number == 0:
                profile.enable()
            begin_s = time.thread_time()
            engine.step()
            step_s = time.thread_time() - begin_s
            parts = {"step": step_s, **watch.parts(step_s)}
            if rank is not None:
                parts |= rank.run()
                watch.spent.clear()  # of the rank's own build
            if number >= 0:
                for name, seconds in parts.items():
                    times.setdefault(name, []).append(seconds)
    finally:
        if profile is not None:
            profile.disable()
        replace(ForwardBatch, "build", build)
    return {name: round(median(values) * 1e3, 4) for name, values in times.items()}


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of an object or a class, whatever its type says of it."""
    setattr(owner, name, value)


def main() -> int:
    args = parse()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    common = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "lookahead": args.lookahead,
        "block_size": BLOCK_SIZE,
        "steps": args.steps,
    }
    profile = cProfile.Profile() if args.profile else None
    table = []
    for kind, params in KINDS.items():
        for is_changing in (False, True):
            for num_seqs, context in itertools.product(args.seqs, args.context):
                run = "changing" if is_changing else "steady"
                if kind not in args.kinds or run not in args.runs:
                    continue
                figures = measure(
                    num_seqs,
                    params,
                    steps=args.steps,
                    lookahead=args.lookahead,
                    device=device,
                    is_changing=is_changing,
                    context=context,
                    has_ranks=args.ranks,
                    profile=profile,
                )
                line = common | {"rows": kind, "run": run, "seqs": num_seqs, "context": context}
                line |= {"load": round(os.getloadavg()[0], 2), "ms": figures}
                print(json.dumps(line), flush=True)
                table.append((kind, run, num_seqs, context, figures))
    names = [name for *_, figures in table[:1] for name in figures]
    print(f"\n{'rows':10} {'run':9} {'seqs':>4}{'context':>8}" + "".join(f"{p:>10}" for p in names))
    for kind, run, num_seqs, context, figures in table:
        numbers = "".join(f"{figures[name]:10.3f}" for name in names)
        print(f"{kind:10} {run:9} {num_seqs:4}{context:8}{numbers}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seqs", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--context", nargs="+", type=int, default=[CONTEXT], help="of a prompt")
    parser.add_argument("--ranks", action="store_true", help="a second one, and what it is sent")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lookahead", type=int, choices=(0, 1), default=1)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument(
        "--runs", nargs="+", choices=("steady", "changing"), default=["steady", "changing"]
    )
    parser.add_argument("--profile", action="store_true", help="of all runs, printed last")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
