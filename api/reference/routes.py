"""Parameters of paths, queries and headers, and responses: a sentence for each."""

from __future__ import annotations

from collections.abc import Mapping

# By name; where routes differ, a part of the path before it.
PARAMETERS: Mapping[str, str] = {
    "idempotency-key": (
        "A name that the client chooses: the same request with the same key is the same job, "
        "running or finished, for ten minutes after its end or longer, as the job is kept."
    ),
    "penstock-events": (
        "`recovery`: a stream of one job also has events of the type `recovery`, one when the job "
        "has lost its worker, one when another worker has resumed it. Without a stream it has no "
        "effect."
    ),
    "last-event-id": "The same as `after`, which it overrides; a browser's EventSource sends it.",
    "anthropic-version": "Any value: the response has Anthropic's shape.",
    "/responses name": "The id of a response, `resp_...`.",
    "/jobs name": "The id of a job, or of what it returned: `chatcmpl-...`, `resp_...`, `msg_...`.",
    "/dead-letters name": "The id of the job.",
    "file_id": "The id of a file, `file-...`.",
    "batch_id": "The id of a batch, `batch_...`.",
    "worker_id": "The id of a worker in `GET /health`.",
    "model_id": "The name of a model; it may have slashes.",
    "limit": "The most objects to return.",
    "/events limit": "The most events to return.",
    "after": "The id of the last object of the page before.",
    "after_id": "With `anthropic-version`: the id of the last model of the page before.",
    "before_id": "With `anthropic-version`: the id of the first model of the page after.",
    "/v1/models limit": "With `anthropic-version`: the most models to return, 20 by default.",
    "/events after": "The id of the last event that was read. Default: from the start.",
    "/stream after": "The id of the last event that was read. Default: from the start.",
    "order": "By time of creation: `asc` begins with the oldest, `desc` with the newest.",
    "purpose": "Only files with this purpose.",
    "state": "Only jobs in this state.",
    "prefix": "True: adds `prefix`, the reason why the prompt was cached or computed again.",
    "token": "Replaces a key: a token of `POST /v1/jobs/{id}/stream-token`.",
    "offset": (
        "Where to begin: `-1` is the start, `now` the end, else `Stream-Next-Offset` of the last "
        "response. Required with `live`."
    ),
    "live": "`long-poll` waits up to 20 s for text, `sse` streams it as events.",
    "cursor": "`Stream-Cursor` of the last response.",
    "model": "The name of a model; optional if only one is served.",
    "stream": "True: returns the events of the response instead of the response.",
    "starting_after": "With `stream`: the number of the last event that was read. Default: all.",
    "include": "Accepted without effect: log probabilities are returned if they were requested.",
    "include[]": "The same as `include`, as SDKs write a list.",
    "include_obfuscation": "False only: no padding is sent.",
}

# By status; where routes differ, `METHOD path` before it.
RESPONSES: Mapping[str, str] = {
    "400": (
        "A parameter is unknown, wrong or not served: `error.param` names it, `error.code` is the "
        "reason. Also for a body that is not JSON."
    ),
    "401": "The key is missing or unknown (`invalid_api_key`).",
    "403": (
        "The key is disabled or not an operator's, or the page's origin is not allowed "
        "(`origin_not_allowed`)."
    ),
    "404": "The model or object is unknown, or belongs to another tenant.",
    "408": "The body did not arrive in `PENSTOCK_BODY_TIMEOUT_S`.",
    "409": "The request does not fit the state of the object or job; `error.code` is the reason.",
    "410": "The job or its text has expired (`job_expired`).",
    "413": "The body is larger than `PENSTOCK_MAX_BODY_BYTES`.",
    "415": "The `Content-Type` is not JSON, or the body is compressed in an unknown coding.",
    "421": "The `Host` is not one of this server (`host_not_allowed`).",
    "429": (
        "A limit of the tenant is reached: requests or tokens per minute, or jobs. `Retry-After` "
        "has the seconds to wait."
    ),
    "431": "The headers are longer than 64 KiB.",
    "500": "A fault of the server; its log has the request id.",
    "502": "The job failed: it crashed its workers, or its output cannot follow its grammar.",
    "503": (
        "The server is full, Redis is unreachable, or no worker has served the model. "
        "`Retry-After` has the seconds to wait."
    ),
    "504": "The job did not start or end in time (`queue_timeout`, `deadline_exceeded`).",
    "529": "As 503 in the other dialects; Anthropic's SDKs try again.",
    "POST /v1/chat/completions 200": "The next message, or its chunks with `stream: true`.",
    "POST /v1/completions 200": "The continuation, or its chunks with `stream: true`.",
    "POST /v1/embeddings 200": "The vectors, in the order of the inputs.",
    "POST /v1/responses 200": "The response, or its events with `stream: true`.",
    "POST /v1/responses/compact 200": "The conversation as one item.",
    "POST /v1/responses/input_tokens 200": "The number of tokens.",
    "GET /v1/responses/{name} 200": "The response so far, or its events with `stream=true`.",
    "DELETE /v1/responses/{name} 200": "The response is deleted.",
    "POST /v1/responses/{name}/cancel 200": "The response as it ended.",
    "POST /v1/responses/{name}/cancel 400": "The response is not in the background.",
    "GET /v1/responses/{name}/input_items 200": "A page of items.",
    "POST /generate 200": "Events with text and token ids, or one object with `stream: false`.",
    "POST /v1/messages 200": "The assistant's message, or its events with `stream: true`.",
    "POST /v1/messages/count_tokens 200": "The number of tokens.",
    "POST /v1/files 200": "The stored file.",
    "POST /v1/files 403": "The key is disabled, or the tenant's quota is used up.",
    "POST /v1/files 413": "The file is larger than `PENSTOCK_MAX_FILE_BYTES`.",
    "GET /v1/files 200": "A page of files.",
    "GET /v1/files/{file_id} 200": "The file's name, size and times.",
    "GET /v1/files/{file_id}/content 200": "The bytes of the file.",
    "DELETE /v1/files/{file_id} 200": "The file is deleted.",
    "DELETE /v1/files/{file_id} 409": "A batch reads the file (`file_in_use`).",
    "POST /v1/batches 200": "The new batch; its rows are checked next.",
    "GET /v1/batches 200": "A page of batches.",
    "GET /v1/batches/{batch_id} 200": "The batch with its counts and files.",
    "DELETE /v1/batches/{batch_id} 200": "The batch is deleted.",
    "DELETE /v1/batches/{batch_id} 409": "The batch has not ended.",
    "POST /v1/batches/{batch_id}/cancel 200": "The batch, which is being cancelled.",
    "POST /v1/batches/{batch_id}/cancel 409": "The batch has ended (`batch_has_ended`).",
    "GET /v1/models 200": "The models, served ones first.",
    "GET /v1/models/{model_id} 200": "The model.",
    "POST /tokenize 200": "The token ids.",
    "GET /tokenizer_info 200": "The chat template and the special tokens.",
    "POST /detokenize 200": "The text.",
    "GET /v1/jobs 200": "The jobs, newest first.",
    "GET /v1/jobs/{name} 200": "The job.",
    "DELETE /v1/jobs/{name} 200": "The job as it ended.",
    "POST /v1/jobs/{name}/cancel 200": "The job as it ended.",
    "GET /v1/jobs/{name}/stream 200": "The events after `after`.",
    "GET /v1/jobs/{name}/stream 204": "The job has ended, and all of its text was read.",
    "GET /v1/jobs/{name}/events 200": "A page of events, oldest first.",
    "POST /v1/jobs/{name}/stream-token 200": "The token, and the URL that contains it.",
    "GET /v1/dead-letters 200": "The dead letters, newest first.",
    "DELETE /v1/dead-letters/{name} 200": "The dead letter is deleted.",
    "POST /v1/jobs/{name}/requeue 200": "The new job.",
    "POST /v1/jobs/{name}/requeue 409": "The request was too large to keep (`payload_lost`).",
    "HEAD /v1/jobs/{name}/text 200": "The headers have the last offset.",
    "GET /v1/jobs/{name}/text 200": "The text from `offset` on, or its events with `live=sse`.",
    "GET /v1/jobs/{name}/text 204": "No text came during the long poll.",
    "GET /v1/jobs/{name}/text 304": "`If-None-Match` names this text.",
    "GET /v1/jobs/{name}/prompt 200": "A part of the job's prompt.",
    "GET /v1/jobs/{name}/answer 200": "A part of the job's output.",
    "POST /v1/jobs/cancel 200": "The number of jobs that were cancelled.",
    "POST /v1/dead-letters/requeue 200": "The number of letters that run again.",
    "POST /v1/workers/{worker_id}/drain 200": "The worker takes no more jobs.",
    "POST /v1/workers/{worker_id}/resume 200": "The worker takes jobs again.",
    "POST /v1/models/{model_id}/pause 200": "The model's queue is paused.",
    "POST /v1/models/{model_id}/resume 200": "The model's queue is open again.",
    "GET /v1/deployment/stream 200": "An event `snapshot`, then events `change`.",
    "GET /health 200": "The process runs; `status` is the state of the deployment.",
    "HEAD /health 200": "The process runs.",
    "GET /ready 200": "Requests are accepted.",
    "HEAD /ready 200": "Requests are accepted.",
    "GET /ready 503": (
        "No requests are accepted: no model is known, Redis is unreachable or full, or the "
        "frontend is shutting down."
    ),
    "GET /version 200": "The release.",
    "GET /metrics 200": "Metrics in the Prometheus text format.",
    "GET /metrics/deployment 200": "Metrics in the Prometheus text format.",
    "GET /openapi.json 200": "This document.",
}
