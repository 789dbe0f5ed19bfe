"""The hub's progress bars, which also report the downloaded share of a model to the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def reporting_bar(report: Callable[[float], None]) -> type[Any]:
    """Returns a class of bars for `snapshot_download`: they look as ever, and `report` gets the
    share that is done, 0 to 1, in any thread; nothing where all is in the cache.

    Of bytes there are two bars, received and written; the one that is further counts. Releases of
    the hub's package that give this class no bar of bytes have one of files.
    """
    # Here and not above: it takes most of a second, and a local directory does not need it.
    from huggingface_hub.utils.tqdm import tqdm

    bars_of_bytes: list[Bar] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._is_of_bytes = kwargs.get("unit") == "B"
            self._num_done = kwargs.get("initial") or 0
            if self._is_of_bytes:
                bars_of_bytes.append(self)
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            # `self.n` stays where it is while bars are not shown, as where there is no terminal.
            self._num_done += n or 0
            self._report()
            shown: bool | None = super().update(n)
            return shown

        def refresh(self, *args: Any, **kwargs: Any) -> bool | None:
            """Reports too, for the hub's package refreshes a bar whose total has grown."""
            self._report()
            shown: bool | None = super().refresh(*args, **kwargs)
            return shown

        def _report(self) -> None:
            if not getattr(self, "total", None):  # tqdm refreshes it while it is made
                return
            if self._is_of_bytes:
                report(max(bar._share() for bar in bars_of_bytes))
            elif not bars_of_bytes:
                report(self._share())

        def _share(self) -> float:
            total = getattr(self, "total", None)
            return min(1.0, max(0.0, self._num_done / total)) if total else 0.0

    return Bar
