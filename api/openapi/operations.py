"""The table of routes: one line each. A route without a line here fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from api.batches import protocol as batch_schemas
from api.batches import routes as batches
from api.dialects.chat.protocol import ChatRequest
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.generate.protocol import GenerateRequest
from api.dialects.messages import protocol as anthropic
from api.dialects.responses import items as item_list
from api.dialects.responses import protocol as responses
from api.files import routes as files
from api.jobs import routes as jobs
from api.openapi import answers, batch_answers
from api.openapi.operation import (
    ANY,
    BODY,
    FINDS,
    FORM,
    JSON,
    KEYED,
    STORE,
    STREAM,
    Operation,
    Parameter,
    finds,
    free,
    generates,
    reads,
)
from api.system.protocol import DetokenizeRequest, TokenizeRequest
from shared.messages import JobState

_STATE = Parameter(name="state", schema={"type": "string", "enum": list(JobState)})
_LIMIT = Parameter(
    name="limit",
    schema={
        "type": "integer",
        "minimum": 1,
        "maximum": jobs.MAX_LIMIT,
        "default": jobs.DEFAULT_LIMIT,
    },
)
_CURSOR = {"type": "string", "pattern": "^[0-9]{1,19}-[0-9]{1,19}$"}
_AFTER = (
    Parameter(name="after", schema=_CURSOR, why="The id of the last event that was read."),
    Parameter(name="last-event-id", schema=_CURSOR, where="header", why="As `after`; goes first."),
    Parameter(name="token", schema={"type": "string"}, why="In place of a key: of `stream-token`."),
)
_TAIL = Operation(
    tag="Jobs",
    media=(STREAM,),
    parameters=_AFTER,
    errors=FINDS,
    others={204: "The job has ended and nothing is left to tell."},
)
_INCLUDE = Parameter(name="include", schema={"type": "string", "enum": [responses.LOGPROBS]})
_RESPONSE = Operation(
    tag="OpenAI",
    answer=answers.ResponseObject,
    media=(JSON, STREAM),
    parameters=(
        Parameter(name="stream", schema={"type": "boolean", "default": False}),
        Parameter(
            name="starting_after",
            schema={"type": "integer", "minimum": 0, "maximum": 2**53 - 1},
            why="Only with `stream`: the number of the last event that was read.",
        ),
        _INCLUDE,
        Parameter(name="include_obfuscation", schema={"type": "boolean", "enum": [False]}),
    ),
    errors=FINDS,
)
_ITEMS = Operation(
    tag="OpenAI",
    answer=answers.ItemList,
    parameters=(
        Parameter(
            name="limit",
            schema={
                "type": "integer",
                "minimum": 1,
                "maximum": item_list.MAX_LIMIT,
                "default": item_list.DEFAULT_LIMIT,
            },
        ),
        Parameter(name="order", schema={"type": "string", "enum": list(item_list.ORDERS)}),
        Parameter(name="after", schema={"type": "string"}, why="The id of the last item read."),
        _INCLUDE,
    ),
    errors=FINDS,
)
_PAGE_AFTER = Parameter(
    name="after", schema={"type": "string"}, why="The id of the last one that was read."
)


def _page_limit(default: int, most: int) -> Parameter:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter(name="limit", schema=schema)


_FILES = Operation(
    tag="OpenAI",
    answer=batch_answers.FileList,
    parameters=(
        Parameter(name="purpose", schema={"type": "string", "enum": ["batch", "batch_output"]}),
        Parameter(name="order", schema={"type": "string", "enum": list(files.ORDERS)}),
        _page_limit(files.MAX_LIMIT, files.MAX_LIMIT),
        _PAGE_AFTER,
    ),
)
_BATCHES = Operation(
    tag="OpenAI",
    answer=batch_answers.BatchList,
    parameters=(_page_limit(batches.DEFAULT_LIMIT, batches.MAX_LIMIT), _PAGE_AFTER),
)
_UPLOAD = Operation(
    tag="OpenAI",
    body=batch_answers.FileForm,
    body_media=FORM,
    answer=batch_answers.FileObject,
    errors=STORE | {408},
)
_NOT_READY = {503: "Requests are not accepted here now."}
_MESSAGE = answers.MessagesError

Table = Mapping[str, Operation]  # by method and path

OPERATIONS: Table = {
    "POST /v1/chat/completions": generates(
        "OpenAI", ChatRequest, answers.ChatCompletion, kind="chat"
    ),
    "POST /v1/completions": generates(
        "OpenAI", CompletionRequest, answers.Completion, kind="completion"
    ),
    "POST /v1/responses": generates(
        "OpenAI", responses.ResponseRequest, answers.ResponseObject, kind="response"
    ),
    "GET /v1/responses/{name}": _RESPONSE,
    "DELETE /v1/responses/{name}": finds("OpenAI", answers.ResponseDeleted),
    "POST /v1/responses/{name}/cancel": finds("OpenAI", answers.ResponseObject),
    "GET /v1/responses/{name}/input_items": _ITEMS,
    "POST /v1/files": _UPLOAD,
    "GET /v1/files": _FILES,
    "GET /v1/files/{file_id}": finds("OpenAI", batch_answers.FileObject),
    "GET /v1/files/{file_id}/content": Operation(
        tag="OpenAI", media=("application/octet-stream",), errors=FINDS
    ),
    "DELETE /v1/files/{file_id}": replace(
        finds("OpenAI", batch_answers.FileDeleted), errors=FINDS | {409}
    ),
    "POST /v1/batches": Operation(
        tag="OpenAI",
        body=batch_schemas.BatchRequest,
        answer=batch_answers.BatchObject,
        errors=BODY,
    ),
    "GET /v1/batches": _BATCHES,
    "GET /v1/batches/{batch_id}": finds("OpenAI", batch_answers.BatchObject),
    "POST /v1/batches/{batch_id}/cancel": replace(
        finds("OpenAI", batch_answers.BatchObject), errors=FINDS | {409}
    ),
    "POST /v1/messages": generates(
        "Anthropic",
        anthropic.MessageRequest,
        answers.MessagesAnswer,
        kind="message",
        error=_MESSAGE,
    ),
    "POST /v1/messages/count_tokens": reads(
        "Anthropic", anthropic.CountTokensRequest, answers.InputTokens, error=_MESSAGE
    ),
    "POST /generate": generates("Native", GenerateRequest, answers.Generated),
    "POST /tokenize": reads("Models", TokenizeRequest, answers.Tokens),
    "POST /detokenize": reads("Models", DetokenizeRequest, answers.Detokenized),
    "GET /v1/models": Operation(tag="Models", answer=answers.ModelList, errors=ANY),
    "GET /v1/models/{model_id}": finds("Models", answers.Model),
    "GET /v1/jobs": Operation(tag="Jobs", answer=answers.JobList, parameters=(_STATE, _LIMIT)),
    "GET /v1/jobs/{name}": finds("Jobs", answers.JobAnswer),
    "DELETE /v1/jobs/{name}": finds("Jobs", answers.JobAnswer),
    "POST /v1/jobs/{name}/cancel": finds("Jobs", answers.JobAnswer),
    "GET /v1/jobs/{name}/stream": _TAIL,
    "POST /v1/jobs/{name}/stream-token": finds("Jobs", answers.StreamToken),
    "POST /v1/jobs/{name}/requeue": replace(finds("Jobs", answers.JobAnswer), errors=FINDS | {409}),
    "GET /v1/dead-letters": Operation(
        tag="Jobs", answer=answers.DeadLetterList, parameters=(_LIMIT,)
    ),
    "DELETE /v1/dead-letters/{name}": finds("Jobs", answers.DeadLetterDeleted),
    "GET /health": replace(free(answers.Health), errors=KEYED),
    "HEAD /health": replace(free(), errors=KEYED),
    "GET /ready": replace(free(answers.Readiness), others=_NOT_READY),
    "HEAD /ready": replace(free(), others=_NOT_READY),
    "GET /version": Operation(tag="Service", answer=answers.Version, errors=KEYED),
    "GET /metrics": Operation(tag="Service", media=("text/plain",), errors=KEYED),
    "GET /openapi.json": free(dict),
}
