"""Finds out what an upstream is: its program, its model, and whether its tokenizer is ours."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from shared.text.base import Tokenizer
from worker.engines.http.llama_server import LlamaServer
from worker.engines.http.servers import Facts, Server
from worker.engines.http.sglang_server import SglangServer
from worker.engines.http.vllm_server import VllmServer
from worker.model.errors import ModelError

CONNECT_TIMEOUT_S = 5.0
MAX_ERROR_CHARS = 500
# Words, digits, spaces, accents, another script, code: vocabularies differ in some of them.
SAMPLE = (
    "The quick brown fox, 1234567890 times.\n\n  def f(x):\n\treturn x**2  # naïve café 漢字 🦊"
)
SERVERS: tuple[Server, ...] = (VllmServer(), LlamaServer(), SglangServer())
HEALTH = "/health"  # of all of them


class KeyFile:
    """The key of the upstreams, read again when its file changes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser() if path else None
        self._changed_ns = -1
        self._key = ""

    def headers(self) -> dict[str, str]:
        """Returns the header with the key. Raises OSError."""
        if self._path is None:
            return {}
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            key = self._path.read_text(errors="replace").strip()
            if not key.isprintable() or not key.isascii() or not key:
                raise OSError(
                    errno.EINVAL, "the file must contain one key, in ASCII", str(self._path)
                )
            self._key, self._changed_ns = key, changed_ns
        return {"Authorization": f"Bearer {self._key}"}


class Found(NamedTuple):
    """An upstream that has been looked at."""

    server: Server
    model: str  # its name there
    facts: Facts


async def find(
    http: httpx2.AsyncClient, url: str, model: str, key: KeyFile, tokenizer: Tokenizer
) -> Found:
    """Looks at the server of a URL. `model`: its name there; empty: it has only one.

    Raises ModelError when it cannot serve this model, and OSError when it does not answer.
    """
    await _ask(http, key, url + HEALTH)  # its HTTP server may outlive its engine
    entry = await _find_model(http, url, model, key)
    for server in SERVERS:
        answer = await _answer_of(http, key, url + server.facts)
        if answer is None:
            continue
        try:
            found = Found(server, str(entry["id"]), server.read_facts(answer, entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{url}{server.facts} has other fields than expected: {error!r}"
            ) from error
        await _compare_tokenizers(http, url, found, key, tokenizer)
        return found
    raise ModelError(f"{url} is not vLLM, llama.cpp or SGLang, which stream token ids")


async def _compare_tokenizers(
    http: httpx2.AsyncClient, url: str, found: Found, key: KeyFile, tokenizer: Tokenizer
) -> None:
    body = found.server.tokenize_body(found.model, SAMPLE)
    answer = await _answer_of(http, key, url + found.server.tokenize_path, body)
    if answer is None or "tokens" not in answer:
        raise ModelError(f"{url} does not tokenize, so its tokenizer cannot be compared with ours")
    if answer["tokens"] != tokenizer.encode(SAMPLE, add_special_tokens=False):
        raise ModelError(
            f"the tokenizer of {found.model} at {url} is not that of PENSTOCK_MODEL, which must "
            "name the checkpoint that it serves"
        )


async def _answer_of(
    http: httpx2.AsyncClient, key: KeyFile, url: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Returns the JSON object of an answer, as `_ask`; None for a 404."""
    response = await _ask(http, key, url, body)
    if response is None:
        return None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ModelError(f"{url} answers no JSON object: {response.text[:MAX_ERROR_CHARS]}")
    return answer


async def _ask(
    http: httpx2.AsyncClient, key: KeyFile, url: str, body: Mapping[str, Any] | None = None
) -> httpx2.Response | None:
    """Returns the answer to a GET, or to a POST with `body`; None for a 404.

    Raises ModelError for another failure, OSError where it is not ready or does not answer.
    """
    try:
        response = await http.request(
            "GET" if body is None else "POST",
            url,
            json=body,
            headers=key.headers(),
            timeout=CONNECT_TIMEOUT_S,
        )
    except httpx2.HTTPError as error:
        raise ConnectionError(f"{url} does not answer: {type(error).__name__}: {error}") from error
    if response.status_code == 404:
        return None
    sentence = f"{url} answers {response.status_code}: {response.text[:MAX_ERROR_CHARS]}"
    if response.status_code in (401, 403):
        raise ModelError(f"{sentence}; PENSTOCK_UPSTREAM_KEY_FILE names the file with its key")
    if response.status_code >= 500 or response.status_code == 429:  # it loads its model, or is busy
        raise ConnectionError(sentence)
    if not response.is_success:
        raise ModelError(sentence)
    return response


async def _find_model(
    http: httpx2.AsyncClient, url: str, model: str, key: KeyFile
) -> dict[str, Any]:
    """Returns the entry in an upstream's /v1/models: of `model`, or of the only one if it is empty.

    Raises ModelError if there is no such entry, and as `_answer_of`.
    """
    answer = await _answer_of(http, key, f"{url}/v1/models")
    if answer is None:
        raise ModelError(f"{url}/v1/models is unknown there (404); check PENSTOCK_UPSTREAM_URLS")
    entries = {str(entry["id"]): entry for entry in answer.get("data") or () if "id" in entry}
    if model in entries:
        return dict(entries[model])
    if not model and len(entries) == 1:
        return dict(*entries.values())
    raise ModelError(
        f"{url} serves {', '.join(sorted(entries)) or 'no model'}; PENSTOCK_UPSTREAM_MODEL names "
        "the one to use"
    )
