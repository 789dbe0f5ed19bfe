"""A client of a running service, whose streams resume by themselves after a failure.

    from penstock.client import Client

    with Client("http://127.0.0.1:8000") as client:
        for delta in client.chat("What is a penstock?"):
            print(delta.text, end="", flush=True)

`AsyncClient` is the same for asyncio. docs/adr/0057 has the reasons for it. This
package imports nothing else of Penstock.
"""

from penstock.client.answer import Answer, Choice, Delta
from penstock.client.asynchronous import AsyncClient, AsyncStream
from penstock.client.blocking import Client, Stream
from penstock.client.errors import (
    Gone,
    InvalidRequest,
    JobCancelled,
    JobExpired,
    JobFailed,
    NotFound,
    NotPermitted,
    Overloaded,
    PenstockError,
    Refused,
    StreamLost,
    Unreachable,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "Delta",
    "Gone",
    "InvalidRequest",
    "JobCancelled",
    "JobExpired",
    "JobFailed",
    "NotFound",
    "NotPermitted",
    "Overloaded",
    "PenstockError",
    "Refused",
    "Stream",
    "StreamLost",
    "Unreachable",
]
