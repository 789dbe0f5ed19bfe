"""A seeded workload: arrivals, cancels, resumes and faults against one engine and a fake device.

Every request must end exactly once, with the text that it would have had alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind, SamplingParams
from tests.sim.fake_device import EOS, FakeDevice, FaultRates, next_token
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.errors import EngineFailed, EngineFull, RequestRefused
from worker.engine.request import EngineOutput, EngineRequest

MAX_IDLE_STEPS = 3
MAX_STEPS = 20_000


@dataclass(frozen=True)
class Ending:
    reason: FinishReason
    stop_reason: int | None = None
    error: ErrorCode | None = None


def lone_run(
    prompt: tuple[int, ...], params: SamplingParams, config: EngineConfig, vocab: int
) -> tuple[list[int], Ending]:
    """What the request says when it has the whole engine for itself."""
    tokens = list(prompt)
    capacity = config.sequence_capacity_tokens
    if params.max_tokens == 0:
        return [], Ending(FinishReason.LENGTH)
    while True:
        num_outputs = len(tokens) - len(prompt)
        token = next_token(tokens, params, num_outputs, vocab)
        tokens.append(token)
        num_outputs += 1
        ending = None
        may_stop = num_outputs >= params.min_tokens and not params.ignore_eos
        if token == EOS and (may_stop or params.grammar is not None):
            ending = Ending(FinishReason.STOP)
        elif token in params.stop_token_ids and num_outputs >= params.min_tokens:
            ending = Ending(FinishReason.STOP, token)
        elif num_outputs >= params.max_tokens or len(tokens) >= config.max_model_len:
            ending = Ending(FinishReason.LENGTH)
        elif len(tokens) > capacity:
            ending = Ending(FinishReason.ERROR, error=ErrorCode.KV_CAPACITY_EXCEEDED)
        if ending:
            return tokens[len(prompt) :], ending


@dataclass(eq=False)
class Client:
    """One request as its caller sees it, over all its attempts."""

    request: EngineRequest
    want: list[int]
    want_ending: Ending
    got: list[int] = field(default_factory=list)
    state: str = "new"  # new, live, ended, cancelled, failed
    may_resume: bool = False
    scored: list[int] = field(default_factory=list)  # tokens of the prompt

    def take(self, output: EngineOutput) -> None:
        assert self.state == "live", f"{self.state} request got {output}"
        if output.prompt_logprobs:
            assert (output.token_ids, output.finish_reason) == ((), None)
            self.scored += [entry.token_id for entry in output.prompt_logprobs]
            return
        if output.error is None:
            prompt = list(self.request.prompt_token_ids)
            is_scored = self.request.params.prompt_logprobs is not None
            is_scored = is_scored and self.request.scores_prompt
            assert self.scored == (prompt[1:] if is_scored else []), "not once and in order"
        self.got += output.token_ids
        assert self.got == self.want[: len(self.got)], (self.got, self.want)
        wants_logprobs = self.request.params.logprobs is not None
        if wants_logprobs and output.error is None:
            assert output.logprobs is not None
            assert [lp.token_id for lp in output.logprobs] == list(output.token_ids)
        else:
            assert output.logprobs is None
        assert 0 <= output.num_cached_tokens < len(self.request.prompt_token_ids) + len(self.want)
        if output.finish_reason is None:
            assert output.token_ids
            return
        ending = Ending(output.finish_reason, output.stop_reason, output.error)
        fault_codes = (ErrorCode.ENGINE_ERROR, ErrorCode.NONFINITE_LOGITS)
        if output.error in fault_codes:
            self.state = "failed"
            return
        self.state = "ended"
        assert ending == self.want_ending, (ending, self.want_ending)
        assert self.got == self.want, (self.got, self.want)


class Workload:
    """Everything about a run follows from its seed."""

    def __init__(self, seed: int, lookahead: int) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = rng.choice([2, 2, 22]) + 1  # small alphabets make equal blocks, large do not
        block_size = rng.choice([1, 2, 4, 8])
        self.config = EngineConfig(
            num_blocks=rng.randint(6, 40),
            block_size=block_size,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.randint(1, 24),
            max_model_len=rng.choice([40, 400]),
            max_waiting=rng.choice([2, 64]),
            prefix_caching=rng.random() < 0.9,
            lookahead=lookahead,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            eos_token_ids=frozenset({EOS}),
            structured_output=True,
            windows=self._windows(),
        )
        if self.config.prefix_caching and len(self.config.windows) == 1:
            num_copies = rng.choice([0, rng.randint(1, 40)])
            stores = rng.choice([1, 3, 256])
            self.config = replace(
                self.config, num_offload_blocks=num_copies, offload_stores_per_step=stores
            )
        rate = rng.choice([0.0, 0.0, 0.02])
        self.rates = FaultRates(rate, rate, rate, rate / 4, rate / 4, 2 * rate, unready=0.2)
        self.device = FakeDevice(self.config, self.vocab, rng, self.rates)
        self.engine = Engine(self.config, self.device)
        self.num_faults = 0  # of earlier devices
        self.prefixes = [self._tokens(0, 3 * block_size) for _ in range(3)]
        self.tenants = [f"tenant-{i}" for i in range(rng.randint(1, 3))]
        self.clients = [self._client(i) for i in range(rng.randint(3, 25))]
        self.seen: Counter[str] = Counter()

    def _windows(self) -> tuple[int | None, ...]:
        """Returns those of one KV group, or of several, where some have none and come first."""
        rng = self.rng
        if rng.random() < 0.4:
            return (None,)
        windows = [rng.randint(1, 40) for _ in range(rng.randint(1, 3))]
        return (*[None] * rng.randint(0, 2), *windows)

    def run(self) -> Counter[str]:
        """Returns how often the interesting things happened."""
        rng = self.rng
        arriving = list(self.clients)
        num_idle = 0
        while arriving or self.engine.has_unfinished():
            engine = self.engine
            for _ in range(rng.randint(0, 3)):
                if arriving and self._add(arriving[0]):
                    arriving.pop(0)
            if rng.random() < 0.03:
                self._cancel(rng.choice(self.clients))
            num_launched = engine.stats().step
            try:
                outputs = engine.step()
            except EngineFailed as error:
                arriving = [*self._in_another_engine(error), *arriving]
                continue
            engine.check_integrity()
            self.seen["steps"] += 1
            self.seen["gave way to a lane"] += len(engine.measures.gave_way)
            assert self.seen["steps"] < MAX_STEPS
            num_idle = 0 if outputs or engine.stats().step > num_launched else num_idle + 1
            assert num_idle <= MAX_IDLE_STEPS or not engine.has_unfinished(), "nothing moves"
            self._deliver(outputs)
            arriving += self._resumed()
        self._check_end()
        return self.seen

    def _in_another_engine(self, error: EngineFailed) -> list[Client]:
        """What lived goes on there, with the tokens that it had."""
        self.seen[f"engines ended: {type(error).__name__}"] += 1
        self.num_faults += self.device.num_faults
        self._count_device()
        self._count_engine()
        prompts = self.device.prompts
        self.device = FakeDevice(self.config, self.vocab, self.rng, self.rates)
        self.device.prompts = prompts
        self.engine = Engine(self.config, self.device)
        again = [client for client in self.clients if client.state == "live"]
        for client in again.copy():
            num_known = len(client.request.prompt_token_ids) + len(client.got)
            if num_known > self.config.sequence_capacity_tokens:  # it would be refused there
                assert client.want_ending.error is ErrorCode.KV_CAPACITY_EXCEEDED
                client.state = "ended"
                again.remove(client)
                continue
            client.request = replace(
                client.request,
                output_token_ids=tuple(client.got),
                scores_prompt=not client.got,
            )
            client.scored = []
            client.state = "new"
        return again

    def _count_engine(self) -> None:
        stats = self.engine.stats()
        self.seen["preemptions"] += stats.preemptions
        self.seen["prefix hits"] += stats.prefix_hit_tokens
        self.seen["mixed steps"] += stats.mixed_steps
        self.seen["blocks copied to host memory"] += stats.offload_stored_blocks
        self.seen["blocks loaded from host memory"] += stats.offload_loaded_blocks

    def _count_device(self) -> None:
        self.seen["faults while sampling by grammars"] += self.device.num_sampling_faults
        self.seen["ended before they were sampled"] += len(self.device.ended)

    def _tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(
            self.rng.randint(1, self.vocab - 1) for _ in range(self.rng.randint(low, high))
        )

    def _client(self, i: int) -> Client:
        rng, config = self.rng, self.config
        room = min(config.max_model_len - 1, config.sequence_capacity_tokens)
        longest = 2 * config.block_size + 3
        if room > config.capacity_tokens and rng.random() < 0.3:
            longest = room  # with a window it need not fit the cache
        prompt = rng.choice(self.prefixes) + self._tokens(1, longest)
        prompt = prompt[: max(1, room if rng.random() < 0.05 else room // 2)]
        max_tokens = rng.randint(1, 400) if rng.random() < 0.05 else rng.randint(1, 30)
        max_tokens = 0 if rng.random() < 0.05 else max_tokens
        params = SamplingParams(
            max_tokens=max_tokens,
            prompt_logprobs=0 if rng.random() < 0.25 else None,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(rng.randint(0, self.vocab - 2),) if rng.random() < 0.3 else (),
            logprobs=0 if rng.random() < 0.2 else None,
            grammar=Grammar(GrammarKind.REGEX, "any") if rng.random() < 0.3 else None,
            seed=i,
        )
        want, ending = lone_run(prompt, params, config, self.vocab)
        num_resumed = rng.randint(0, len(want)) if rng.random() < 0.2 else 0
        if len(prompt) + num_resumed > config.sequence_capacity_tokens:
            num_resumed = 0
        tenant = rng.choice(self.tenants)
        request = EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=self.device.introduce(prompt, tenant),
            params=params,
            output_token_ids=tuple(want[:num_resumed]),
            scores_prompt=num_resumed == 0,
            tenant=tenant,
            priority=rng.randint(0, 2),
        )
        client = Client(request, want, ending, got=want[:num_resumed])
        client.may_resume = rng.random() < 0.5
        return client

    def _add(self, client: Client) -> bool:
        try:
            self.engine.add(client.request)
        except EngineFull:
            self.seen["full"] += 1
            return False
        client.state = "live"
        self.seen["resumed"] += bool(client.request.output_token_ids)
        self.seen["with a grammar"] += client.request.params.grammar is not None
        with pytest.raises(RequestRefused):
            self.engine.add(client.request)
        return True

    def _cancel(self, client: Client) -> None:
        was_live = client.state == "live"
        num_held = self.engine.stats().free_blocks
        assert self.engine.cancel(client.request.request_id) is was_live
        assert self.engine.cancel(client.request.request_id) is False
        assert self.engine.stats().free_blocks >= num_held
        if was_live:
            client.state = "cancelled"
            self.seen["cancelled"] += 1

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        by_id = {client.request.request_id: client for client in self.clients}
        for output in outputs:
            by_id[output.request_id].take(output)
            self.seen[f"ended: {output.error or output.finish_reason}"] += 1
            if len(by_id[output.request_id].got) > self.config.capacity_tokens:
                self.seen["longer than the cache"] += output.finish_reason is not None

    def _resumed(self) -> list[Client]:
        """Some that failed or were cancelled come again, with the tokens that they had."""
        again = []
        for client in self.clients:
            capacity = self.config.sequence_capacity_tokens
            num_known = len(client.request.prompt_token_ids) + len(client.got)
            if client.state in ("failed", "cancelled") and client.may_resume:
                client.may_resume = False
                if num_known > capacity:
                    continue
                old = client.request
                client.request = replace(
                    old,
                    prompt_token_ids=self.device.introduce(old.prompt_token_ids, old.tenant),
                    output_token_ids=tuple(client.got),
                    scores_prompt=not client.got,
                )
                client.scored = []
                client.state = "new"
                again.append(client)
        return again

    def _check_end(self) -> None:
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.running == stats.waiting == 0
        assert self.device.next_collect == self.device.next_launch
        for client in self.clients:
            assert client.state in ("ended", "cancelled", "failed"), client.state
        if not self.num_faults + self.device.num_faults:
            assert not any(client.state == "failed" for client in self.clients)
        self._count_engine()
        self.seen["faults"] += self.num_faults + self.device.num_faults
        self._count_device()
