"""Modules that are imported when a test first uses them.

Every process that runs tests imports all of their modules, and runs few of them. SDKs and
frameworks take a second of processor time each.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module. Private names, which pytest reads in its collection, load nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_import(name: str) -> Any:
    """Returns a stand-in for a module; its first use raises ImportError where there is none."""
    return LazyModule(name)
