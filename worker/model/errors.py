"""What can be wrong with a model before its first step: each error is one sentence for a person."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served; the message says why and names the member or file at fault."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something that this code does not compute."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, broken or do not fit its own configuration."""


class DeviceUnavailable(ModelError):
    """The device or the number format asked for does not exist here."""


class KVCacheTooSmall(ModelError):
    """The memory left for the KV cache cannot hold what was asked for."""


class TierUnavailable(ModelError):
    """One of the CPU's speed tiers cannot run here, or not this model."""
