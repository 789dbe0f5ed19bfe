"""The variables of settings that tests name without the prefix."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.launcher.settings import setting_names
from shared.environment import variable_of


def with_prefix(env: Mapping[str, object]) -> dict[str, str]:
    """Returns `env` as processes read it: names of settings get the prefix, others stay."""
    return {
        variable_of(name) if name.lower() in setting_names() else name: str(value)
        for name, value in env.items()
    }
