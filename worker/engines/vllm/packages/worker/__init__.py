"""The package `worker`, found by an interpreter that must not find its neighbours."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[4])]
