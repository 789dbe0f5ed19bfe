"""The ready line of `make run`: models, addresses, and a command to try them."""

from __future__ import annotations

import json
import shlex
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from threading import Event
from typing import Any

from penstock.launcher.redis_server import inspect_command
from penstock.launcher.settings import LauncherSettings
from penstock.launcher.worker_specs import WorkerSpec
from shared.redis.url import redacted

POLL_S = 0.1
TELL_S = 3.0  # between two lines about a model that is loading
TELL_PERCENT = 10  # more than before, of the same stage
PAGES = {"Playground": "/", "Dashboard": "/dashboard", "API": "/docs"}
# Not listening yet or not ready (URLError is an OSError); another server than a frontend: its
# answer is not HTTP, or not JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)


class ReadyLine:
    """Looks at the frontends until the models are served; prints the ready line then.

    `refusals` has the labels of workers that will not be started again, each with its reason. It
    grows while this looks. A worker without a model's name may serve any.
    """

    def __init__(
        self,
        settings: LauncherSettings,
        redis_url: str,
        specs: Sequence[WorkerSpec],
        refusals: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._redis_url = redis_url
        self._password_file = settings.data_dir.absolute() / "redis" / "password"
        self._is_json = settings.ready_format == "json"
        self._timeout_s = settings.ready_timeout_s
        self._urls = [base_url(settings, index) for index in range(settings.frontends)]
        self._specs = specs
        self._refusals = refusals
        self._say = say
        self._names = list(dict.fromkeys(spec.model for spec in specs if spec.model))
        self._told_s = time.monotonic()
        self._told: dict[str, tuple[str, int]] = {}  # by worker: the stage, and its percent

    def announce(self, over: Event) -> bool:
        """Blocks until every frontend has every model, then prints; names later ones once they are.

        It does not wait for a model whose workers are all refused, and after `ready_timeout_s` for
        none: it prints where one is served. False: no model was, or `over` was set before.
        """
        deadline_s = time.monotonic() + self._timeout_s
        missing = list(self._names)
        is_printed = False
        while True:
            served = self._served_everywhere()
            for name in [name for name in missing if name in served]:
                missing.remove(name)
                if len(self._names) > 1:
                    self._say(f"{name} is served ({self._engines(name)})")
            if missing or not served:
                self._tell_loading()
            pending = [name for name in missing if not self._is_refused(name)]
            is_late = time.monotonic() > deadline_s
            if not is_printed and served and (is_late or not pending):
                self._print(served, missing)
                is_printed = True
            if is_printed and not pending:
                return True
            if (is_late and not is_printed) or over.wait(POLL_S):
                return is_printed

    def _tell_loading(self) -> None:
        """Prints the progress of workers that load a model, if the load is slow."""
        if time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        for worker in _loading_workers(self._urls[0]):
            stage, share = str(worker.get("stage")), worker.get("percent")
            percent = share if isinstance(share, int) else 0
            told = self._told.get(str(worker.get("id")))
            if told is None or told[0] != stage or percent >= told[1] + TELL_PERCENT:
                self._told[str(worker.get("id"))] = (stage, percent)
                done = f", {percent} %" if percent else ""
                self._say(f"{worker.get('model')}: {stage}{done}")

    def _served_everywhere(self) -> list[str]:
        """Returns the models that live workers serve, as the first frontend lists them."""
        first, *others = [_served_models(url) for url in self._urls]
        return [name for name in first if all(name in models for models in others)]

    def _is_refused(self, name: str) -> bool:
        return all(spec.label in self._refusals for spec in self._specs if spec.model == name)

    def _engines(self, name: str) -> str:
        engines = sorted({spec.engine for spec in self._specs if spec.model == name})
        return "PENSTOCK_ENGINE=" + ", ".join(engines)

    def unserved(self) -> str:
        """Returns what `announce` still waits for, as a part of a sentence."""
        served = self._served_everywhere()
        missing = [name for name in self._names if name not in served]
        waits = [f"{name} ({self._why(name)})" for name in missing]
        return ", ".join(waits) or "a model"

    def _print(self, served: Sequence[str], missing: Sequence[str]) -> None:
        url = self._urls[0]
        if self._is_json:
            found = {
                "event": "ready",
                "urls": self._urls,
                "models": list(served),
                "not_served": {name: self._why(name) for name in missing},
                "redis_url": redacted(self._redis_url),
            }
            print(json.dumps(found), flush=True)
            return
        model = next((name for name in self._names if name in served), served[0])
        # Where keys are configured the line needs one; the launcher does not know it.
        listed = _listed_models(f"{url}/v1/models")
        key = ' -H "authorization: Bearer $KEY"' if listed is None else ""
        path, body = _example(model, (listed or {}).get(model, _CHAT))
        lines = [f"\nPenstock is ready: {' '.join(self._urls)}\n\n"]
        lines += [f"  {name:<12}{url}{path}\n" for name, path in PAGES.items()]
        if len(self._names) > 1:
            lines += [f"\nModels: {', '.join(name for name in self._names if name in served)}\n"]
            lines += [f"Not served: {name}: {self._why(name)}\n" for name in missing]
        print(
            f"{''.join(lines)}\n"
            f"  curl -N {url}{path}{key} -H 'content-type: application/json' \\\n"
            f"    -d {shlex.quote(json.dumps(body))}\n\n"
            f"Look inside: {inspect_command(self._redis_url, self._password_file)}\n"
            "Stop: Ctrl-C\n",
            flush=True,
        )

    def _why(self, name: str) -> str:
        labels = [spec.label for spec in self._specs if spec.model == name]
        reasons = [self._refusals[label] for label in labels if label in self._refusals]
        return reasons[0] if len(reasons) == len(labels) else "its worker is still starting"


def base_url(settings: LauncherSettings, index: int) -> str:
    """Returns a frontend's URL for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port + index}"


def _served_models(url: str) -> list[str]:
    """Returns the models that a live worker serves; none where another server has the port."""
    try:
        ready = _get_json(f"{url}/ready")
    except _NO_ANSWER:
        return []
    models, unserved = (
        (ready.get("models"), ready.get("unserved")) if isinstance(ready, dict) else (None, None)
    )
    if not isinstance(models, list) or not isinstance(unserved, list):
        return []
    return [name for name in models if isinstance(name, str) and name not in unserved]


def _loading_workers(url: str) -> list[dict[str, Any]]:
    """Returns the workers that are loading, as /health has them; none where it asks for a key."""
    try:
        health = _get_json(f"{url}/health")
    except _NO_ANSWER:
        return []
    loading = health.get("loading") if isinstance(health, dict) else None
    return [worker for worker in loading or () if isinstance(worker, dict)]


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_EMBEDDINGS = "/v1/embeddings"


def _example(model: str, path: str) -> tuple[str, dict[str, Any]]:
    """Returns the path and body of a request that the model can serve."""
    if path == _EMBEDDINGS:
        return path, {"model": model, "input": "What is Penstock?"}
    body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0}
    if path == _CHAT:
        messages = [{"role": "user", "content": "What is Penstock?"}]
        return path, body | {"messages": messages}
    return path, body | {"prompt": "The capital of France is", "max_tokens": 32}


def _listed_models(url: str) -> dict[str, str] | None:
    """Returns the route of each listed model; None where the list is refused."""
    try:
        listed = _get_json(url)
    except _NO_ANSWER:
        return None
    models = listed.get("data") if isinstance(listed, dict) else None
    return {
        model["id"]: _EMBEDDINGS
        if model.get("embedding_size")
        else _COMPLETIONS
        if model.get("has_chat_template") is False
        else _CHAT
        for model in (models if isinstance(models, list) else ())
        if isinstance(model, dict) and isinstance(model.get("id"), str)
    }


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
