"""The errors of requests that cannot be accepted: invalid, not allowed, or beyond a limit."""

from __future__ import annotations

from api.errors import MAX_ECHO_CHARS, ApiError, UnavailableError, overloaded
from shared.messages import InvalidParameter
from shared.transport.ports.admission import QueueFull


class ClientError(ApiError):
    """4xx: the same request will fail again."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        should_retry: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            status,
            message,
            kind="invalid_request_error",
            code=code,
            param=param,
            should_retry=should_retry,
            headers=headers,
        )


MISSING = "missing_required_parameter"


def invalid_parameter(error: InvalidParameter) -> ClientError:
    """Returns a 400 that names the parameter at fault."""
    return ClientError(
        sentence(f"Invalid value for '{error.param}': {error.message}")
        if error.code is None
        else error.message,
        code=error.code,
        param=error.param,
    )


def sentence(text: str) -> str:
    """Returns the text with a full stop, unless it ends as a sentence already does."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def unsupported(param: str, why: str) -> InvalidParameter:
    """Returns the error of a parameter that is known and not supported."""
    return InvalidParameter(
        param, f"Unsupported parameter: '{param}': {why}.", "unsupported_parameter"
    )


def unknown_parameter(param: str) -> InvalidParameter:
    """Returns the error of a parameter that does not exist."""
    param = param[:MAX_ECHO_CHARS]
    return InvalidParameter(param, f"Unknown parameter: '{param}'.", "unsupported_parameter")


def image_not_supported(param: str) -> InvalidParameter:
    """Returns the error of an image in a user's message."""
    return input_not_supported(param, "image")


def input_not_supported(param: str, kind: str) -> InvalidParameter:
    """Returns the error of content that is not text. Clients look for this text, and then leave the
    content out."""
    message = f"Could not process {kind} at '{param}': this model does not support {kind} input."
    return InvalidParameter(param, message, f"{kind.lower()}_not_supported")


def missing_parameter(param: str) -> InvalidParameter:
    """Returns the error of a required parameter that is absent."""
    return InvalidParameter(param, f"Missing required parameter: '{param}'.", MISSING)


def model_not_found(name: str) -> ClientError:
    """Returns the error of a model that no worker serves."""
    message = f"The model '{name[:MAX_ECHO_CHARS]}' does not exist or is not served here."
    return ClientError(message, status=404, code="model_not_found", param="model")


def wrong_task(name: str, task: str) -> InvalidParameter:
    """Returns the error of a model that generates no text, or makes no embeddings."""
    if task == "embed":
        why = f"{name!r} generates text and makes no embeddings."
        return InvalidParameter("model", why, "embeddings_not_supported")
    why = f"{name!r} makes embeddings and generates no text: use POST /v1/embeddings."
    return InvalidParameter("model", why, "model_not_generative")


def job_not_found(name: str) -> ClientError:
    """Returns the error of a job that the caller does not see."""
    message = f"No job '{name[:MAX_ECHO_CHARS]}': it never existed, or its record has expired."
    return ClientError(message, status=404, code="job_not_found", param="id")


def job_expired(message: str, param: str = "id") -> ClientError:
    """Returns the error of an ended job that is no longer stored, or whose text is not."""
    return ClientError(message, status=410, code="job_expired", param=param, should_retry=False)


def dead_letter_not_found(name: str) -> ClientError:
    """Returns the error of a dead letter that the caller does not see."""
    message = (
        f"No dead letter of a job '{name[:MAX_ECHO_CHARS]}': it never existed, "
        "was deleted or has expired."
    )
    return ClientError(message, status=404, code="dead_letter_not_found", param="id")


def idempotency_key_reuse() -> ClientError:
    """Returns the error of a key that was used for another request: 400, the SDKs retry a 409."""
    message = "This idempotency key was already used for a different request. Use a new key."
    code, param = "idempotency_key_reuse", "Idempotency-Key"
    return ClientError(message, code=code, param=param, should_retry=False)


def invalid_api_key(message: str) -> ApiError:
    """Returns the error of a missing key, an unknown one, or an invalid token."""
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        should_retry=False,
        headers={"www-authenticate": 'Bearer realm="penstock"'},
    )


def key_disabled() -> ApiError:
    """Returns the error of a key that is known and disabled."""
    message = "This API key has been disabled."
    return ApiError(403, message, kind="permission_error", code="key_disabled", should_retry=False)


def operator_required(message: str) -> ApiError:
    """Returns the error of a key that is valid, and no operator's."""
    return ApiError(
        403, message, kind="permission_error", code="operator_required", should_retry=False
    )


def key_revoked() -> ApiError:
    """Returns the error of an open request whose key no longer allows it (`KeyRing.allows`)."""
    return invalid_api_key("The API key is no longer valid for this request.")


# scope of a QueueFull -> (code, message): limits of one tenant
_TENANT_LIMITS = {
    "tenant": (
        "tenant_queue_full",
        "Your share of the queue is full: too many of your requests are waiting.",
    ),
    "tenant_tokens": (
        "tenant_queue_full",
        "Your share of the queue is full: too many of your prompt tokens are waiting.",
    ),
    "tenant_store": (
        "tenant_share_exceeded",
        "Your share of the job store is used up by your requests, stored responses, "
        "batches and files. Delete what you no longer need, or wait until it expires.",
    ),
    "tenant_jobs": ("concurrency_limit_exceeded", "Too many of your requests are running at once."),
    "requests_per_minute": ("rate_limit_exceeded", "Too many requests per minute."),
    "tokens_per_minute": ("rate_limit_exceeded", "Too many tokens per minute."),
}


_STORE_LIMITS = {
    "memory": "The job store is full. Try again later.",
    "store": "The job store is nearly full: only small requests that store nothing are accepted. "
    "Send it with 'store': false, or try again later.",
}


def queue_full(error: QueueFull) -> UnavailableError:
    """Returns 429 for a limit of the tenant, 503 for one of the deployment."""
    if error.scope in _TENANT_LIMITS:
        code, message = _TENANT_LIMITS[error.scope]
        return UnavailableError(
            429,
            f"{message} Try again later." if error.scope != "tenant_store" else message,
            kind="rate_limit_error",
            code=code,
            retry_after_s=error.retry_after_s,
            allowances=error.allowances,
        )
    if error.scope in _STORE_LIMITS:
        message = _STORE_LIMITS[error.scope]
        return overloaded(message, error.retry_after_s, error.allowances, code="store_full")
    why = "Too many requests are waiting."
    if error.scope == "deadline":
        why = "Too many requests are waiting: this one would miss its deadline."
    if error.scope == "queue_timeout":
        why = "Too many requests are waiting: this one would exceed its queue timeout."
    return overloaded(f"{why} Try again later.", error.retry_after_s, error.allowances)
