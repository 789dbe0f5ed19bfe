"""Traces of requests: a span of each one that makes a job, after OpenTelemetry's GenAI conventions.

The span is that of the whole response. Its context is the job's: what workers do is inside of it.
No attribute has anything of a prompt or an output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.caller import JOB_TRACE
from shared.logs import log_context
from shared.messages import Failed, Finished, Job
from shared.tracing import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    AttributeValue,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Tracing,
    fail_span,
    format_trace_id,
    read_context,
)

PROVIDER = "penstock"
_SPAN = "span"  # in the scope's state
_TEXT_COMPLETION = "text_completion"
_OPERATIONS = {"completion": _TEXT_COMPLETION, "generate": _TEXT_COMPLETION}  # of all others: chat


def span_in(scope: Scope) -> Span:
    """Returns the span of the request that `scope` belongs to; an invalid one for a request
    without."""
    span = scope.get("state", {}).get(_SPAN)
    return span if isinstance(span, Span) else INVALID_SPAN


class TracesMiddleware:
    """Pure ASGI. Makes the request's span, and puts its trace id into the lines that are logged.

    A request that makes no job, or is not traced here, has the context that its client sent. That
    of an untrusted client becomes only a link: it would decide the sampling.
    """

    def __init__(
        self,
        app: ASGIApp,
        tracing: Callable[[Scope], Tracing],
        paths: Collection[str],
        is_trusted: Callable[[Scope], bool],
    ) -> None:
        """`paths`: those whose POST makes jobs."""
        self._app = app
        self._tracing = tracing
        self._paths = frozenset(paths)
        self._is_trusted = is_trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)
        context = span.get_span_context()
        if not context.is_valid:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})[_SPAN] = span
        if span.is_recording():
            scope["state"][JOB_TRACE] = RequestTrace(span)
        status = 499  # the client had left before there was a response

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = log_context.set({"trace_id": format_trace_id(context.trace_id)})
        try:
            await self._app(scope, receive, watched_send)
        finally:
            log_context.reset(token)
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                fail_span(span, str(status))
            span.end()

    def _begin(self, scope: Scope) -> Span:
        sent = _given_context(scope)
        is_trusted = not sent.is_valid or self._is_trusted(scope)
        given = sent if is_trusted else INVALID_SPAN_CONTEXT
        path: str = scope["path"]
        if scope["method"] != "POST" or path not in self._paths:
            return NonRecordingSpan(given)
        return self._tracing(scope).begin(
            f"POST {path}",
            given,
            kind=SpanKind.SERVER,
            links=() if is_trusted else (sent,),
            attributes={
                "http.request.method": "POST",
                "http.route": path,
                "url.path": path,
                "url.scheme": scope["scheme"],
            },
        )


class RequestTrace:
    """Records the jobs of one request in its span: a JobTrace."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def begin(self, jobs: Sequence[Job], response_id: str) -> None:
        trace_generation(self._span, jobs, response_id)

    def end(self, model: str, end: Finished | Failed, first_token_ms: float | None) -> None:
        trace_end(self._span, model, end, first_token_ms)

    def close(self, outcome: str) -> None:
        """Adds how the response ended."""
        if self._span.is_recording():
            self._span.set_attribute("penstock.outcome", outcome)


def _given_context(scope: Scope) -> SpanContext:
    """Returns the client's trace context; an invalid one where it sent none, or several."""
    traceparents = _headers(scope, b"traceparent")
    if len(traceparents) != 1:
        return INVALID_SPAN_CONTEXT
    return read_context(traceparents[0], ",".join(_headers(scope, b"tracestate")))


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]


def trace_generation(span: Span, jobs: Sequence[Job], response_id: str) -> None:
    """Gives a span the name and attributes of the jobs of one request, or of one row of a batch."""
    if not span.is_recording():
        return
    job = jobs[0]
    sampling = job.sampling
    operation = _OPERATIONS.get(job.kind, "chat")
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.id": response_id,
        "penstock.job.id": job.job_id,
    }
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    if (num_choices := len(jobs) * job.num_choices) > 1:
        attributes["gen_ai.request.choice.count"] = num_choices
    span.update_name(f"{operation} {job.model}")
    span.set_attributes(attributes)


def trace_end(span: Span, model: str, end: Finished | Failed, first_token_ms: float | None) -> None:
    """Adds how the jobs of a span ended. `first_token_ms`: from the submit."""
    if not span.is_recording():
        return
    usage = end.usage
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if first_token_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_token_ms / 1000
    if isinstance(end, Finished):
        attributes["gen_ai.response.finish_reasons"] = [end.reason.value]
    else:
        fail_span(span, end.code)
    span.set_attributes(attributes)
