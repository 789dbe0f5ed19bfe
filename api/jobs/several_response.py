"""SeveralResponse: a request of several prompts. Each is a job of its own, the answer is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import anyio
from starlette.types import Scope

from api.errors import ApiError, store_unreachable
from api.generation.dialect import Dialect
from api.generation.prompt_logprobs import ScoredPrompt
from api.generation.timing import Timing
from api.http.open_requests import Ending
from api.http.response_headers import set_rate_limit_headers
from api.jobs.event_source import AnswerStream
from api.jobs.event_stream import JobStream
from api.jobs.expected_job import take_expected
from api.jobs.merged_stream import MergedStream
from api.jobs.service import JobService
from api.jobs.stream_response import GenerationResponse
from shared.messages import START, Delta, Failed, Finished, Job
from shared.transport.ports.jobs import Submitted, TransportError

log = logging.getLogger(__name__)


class SeveralResponse(GenerationResponse):
    """All jobs are admitted or none. The first that fails ends the answer and cancels the rest."""

    def __init__(
        self,
        service: JobService,
        jobs: Sequence[Job],
        dialect: Dialect,
        timing: Timing,
        *,
        streamed: bool,
        stream_interval: int | None = None,
        prompts: Sequence[ScoredPrompt] = (),
    ) -> None:
        """`jobs` have the same number of choices; the answer is named by the first. `prompts`: each
        job's, where they are scored."""
        super().__init__(
            service,
            jobs[0],
            dialect,
            timing,
            streamed=streamed,
            stream_interval=stream_interval,
        )
        self._jobs = jobs
        self._prompts: Sequence[ScoredPrompt | None] = prompts or [None] * len(jobs)
        self._reader_ids = [service.new_reader_id() for _ in jobs]

    async def _open(self, scope: Scope) -> MergedStream:
        streams: list[JobStream] = []
        try:
            readers = zip(self._jobs, self._reader_ids, self._prompts, strict=True)
            for job, reader_id, prompt in readers:
                streams.append(await self._open_one(scope, job, reader_id, prompt))
            await self._service.admission.confirm(self._jobs)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                for stream, reader_id in zip(streams, self._reader_ids, strict=False):
                    await self._cancel(stream.job_id, reader_id)
                    await stream.aclose()
            self._count(f"refused_{error.status}" if isinstance(error, ApiError) else "interrupted")
            raise
        return MergedStream(streams, self._job.num_choices)

    async def _open_one(
        self, scope: Scope, job: Job, reader_id: str, prompt: ScoredPrompt | None
    ) -> JobStream:
        async def submit() -> Submitted:
            self._timing.submitted_s = time.monotonic()
            admission = self._service.admission
            submission = await admission.submit(job, reader_id, confirms=False)
            set_rate_limit_headers(scope, submission.allowances)
            return submission.outcome

        try:
            resubmit = self._service.admission.resubmit_of(job, reader_id)
            expected = take_expected(scope, job.job_id)
            stream = await self._service.relay.open(
                job.job_id, START, submit, resubmit, prompt, expected=expected
            )
        except TransportError as error:
            raise store_unreachable(error) from error
        self._service.departures.watch(job.job_id, reader_id, job.on_disconnect)
        return stream

    async def _cancel(self, job_id: str, reader_id: str) -> None:
        self._service.departures.unwatch(reader_id)
        await self._service.departures.cancel(job_id)

    def _how_to_go_on(self, stream: AnswerStream) -> str:
        if not self._streamed:
            return "Try again."
        return "GET /v1/jobs/{id}/stream tells the text of each of its jobs."

    def _observe(self, delta: Delta) -> None:
        if delta.token_ids:  # not the mere end of a choice
            super()._observe(delta)

    def _observe_end(self, event: Finished | Failed) -> None:
        super()._observe_end(event)
        others = sum(len(job.prompt_token_ids) for job in self._jobs[1:])
        self._service.metrics.prompt_tokens.inc(others)

    async def _close(self, stream: AnswerStream, ending: Ending | None) -> None:
        assert isinstance(stream, MergedStream)
        departures = self._service.departures
        is_over = self._end is not None
        if not is_over and ending is Ending.LEFT:
            self._outcome = "disconnected"
            self._service.metrics.disconnects.labels(self._job.kind).inc()
        may_go_on = self._outcome == "cut" and self._streamed
        for index, (job, reader_id) in enumerate(zip(self._jobs, self._reader_ids, strict=True)):
            departures.unwatch(reader_id)
            if stream.has_ended(index):
                await departures.delivered(job.job_id, reader_id)
            elif is_over:  # another one failed
                await departures.cancel(job.job_id)
            elif not may_go_on:
                await departures.left(job.job_id, reader_id, job.on_disconnect)
        await stream.aclose()
        self._count(self._outcome)
        log.info(
            "answer ended",
            extra={
                "job_id": self._job.job_id,
                "kind": self._job.kind,
                "outcome": self._outcome,
                "num_jobs": len(self._jobs),
            },
        )
