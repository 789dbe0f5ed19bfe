"""Errors of loading a model. Each message is one sentence for the operator."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served; the message names the reason and the member or file at fault."""


class UnsupportedModel(ModelError):
    """The checkpoint needs something that this code does not compute."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, broken or do not fit its own configuration."""


class DeviceUnavailable(ModelError):
    """The requested device or dtype does not exist on this machine."""


class KVCacheTooSmall(ModelError):
    """The memory left for the KV cache cannot hold what was requested."""


class TierUnavailable(ModelError):
    """One of the CPU's speed tiers cannot run here, or not this model."""
