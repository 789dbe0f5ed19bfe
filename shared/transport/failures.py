"""Redis errors as the errors of the ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError, ResponseError

from shared.redis.topology import PrimaryUnknown, WrongTopology
from shared.transport.ports.jobs import TransportError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the server refused a write above its maxmemory."""
    return isinstance(error, ResponseError) and "maxmemory" in str(error)


def group_is_missing(error: BaseException) -> bool:
    """Returns whether the stream or its group is gone (a flush, an expiry, a failover)."""
    text = str(error)
    return isinstance(error, ResponseError) and ("NOGROUP" in text or "UNBLOCKED" in text)


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Raises TransportError for every error of `action` that the server or the network causes.

    The sentence names the kind of error and never repeats an address or a password.
    """
    try:
        yield
    except RedisError as error:
        # redis-py wraps the error that prevented a connection.
        if isinstance(error.__cause__, PrimaryUnknown | WrongTopology):
            error = error.__cause__
        kind = type(error).__name__
        # A server's message holds no credentials; a connection error's may hold the address.
        is_safe = isinstance(error, ResponseError | PrimaryUnknown | WrongTopology)
        detail = f": {error}" if is_safe else ""
        raise TransportError(f"{action} failed ({kind}{detail})"[:400]) from error
    except (OSError, EOFError) as error:  # TimeoutError and ssl.SSLError are OSErrors
        raise TransportError(f"{action} failed ({type(error).__name__})") from error
