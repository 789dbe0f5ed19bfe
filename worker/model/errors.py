"""Errors of loading a model. Each message is one sentence for the operator."""

from __future__ import annotations

import errno
from collections.abc import Iterator

# Errors that a lack causes which others may end: of disk, memory, descriptors, ports; and those of
# files and peers on a network.
_PASSING = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EADDRINUSE,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EPIPE,
    }
)


class ModelError(Exception):
    """The model cannot be served; the message names the reason and the member or file at fault."""


class UnsupportedModel(ModelError):
    """The checkpoint needs something that this code does not compute."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, broken or do not fit its own configuration."""


class DeviceUnavailable(ModelError):
    """The requested device or dtype does not exist on this machine."""


class KVCacheTooSmall(ModelError):
    """The memory left for the KV cache is less than requested."""


class TierUnavailable(ModelError):
    """One of the CPU's speed tiers cannot run here, or not this model."""


def is_transient(error: BaseException) -> bool:
    """Returns whether an error, or one that it was raised from, is the host's and may pass. Then
    neither the model nor the settings need be at fault."""
    return any(isinstance(one, OSError) and one.errno in _PASSING for one in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
