"""What is refused with 400 names the parameter, in every dialect, before anything is queued."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from shared.text.checkpoint_text import card_from_checkpoint
from tests.integration.api.dialects.bad_parameters import (
    BAD_CHATS,
    BAD_COMPLETIONS,
    BAD_EVERYWHERE,
    BAD_GENERATES,
    BAD_MESSAGES,
    BAD_RESPONSES,
    ENFORCED,
    NO_STRUCTURE,
    PLAIN,
    TOO_LONG,
    TOOLS_ONLY,
    UNSUPPORTED,
    Bad,
)
from tests.support.asgi_client import asgi_client
from tests.support.checkpoints import make_checkpoint
from tests.support.dialects import DIALECTS, Dialect
from tests.support.redis_server import new_namespace
from tests.support.running_service import running_frontend
from tests.support.tool_models import make_hermes_checkpoint

ONE_DIALECT = {
    "chat": BAD_CHATS,
    "completions": BAD_COMPLETIONS,
    "responses": BAD_RESPONSES,
    "messages": BAD_MESSAGES,
    "generate": BAD_GENERATES,
}
JSON = {"content-type": "application/json"}
# Parameters that a stream allows, or refuses for another reason.
OTHERWISE_STREAMED = {"stream", "stream_options", "stream_interval", "prompt_logprobs", "best_of"}


@pytest.fixture(scope="module")
def app(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of an app that keeps three models which no worker serves."""
    directory = tmp_path_factory.mktemp("models")
    plain, hermes = make_checkpoint(directory / "plain"), make_hermes_checkpoint(directory / "h")
    made = {PLAIN: (plain, False), TOOLS_ONLY: (hermes, False), ENFORCED: (hermes, True)}
    settings = {"keep_models": ",".join(made), "queue_timeout_s": 0.5}
    with running_frontend(redis_url, new_namespace(), **settings) as frontend:
        for name, (checkpoint, structured_output) in made.items():
            card, blobs = card_from_checkpoint(
                checkpoint,
                name=name,
                max_model_len=512,
                kv_capacity_tokens=4096,
                dtype="float32",
                num_parameters=1,
                structured_output=structured_output,
            )
            queue = frontend.transport.queue
            frontend.call(queue.setup([name]))
            frontend.call(queue.announce(name, card.to_json(), blobs))
        frontend.until_ready()
        with asgi_client(frontend.app, frontend.loop) as client:
            yield client
            assert client.get("/v1/jobs").json()["data"] == []


def check(app: httpx.Client, dialect: Dialect, bad: Bad) -> None:
    body = {**dialect.body("hi"), "model": bad.model, **bad.params}
    error = dialect.error(app.post(dialect.path, content=json.dumps(body), headers=JSON), 400)
    assert (error.param, error.code) == (bad.param, bad.code), error
    assert re.search(bad.message, error.message)
    assert bad.param in error.message or bad.code in (TOO_LONG, NO_STRUCTURE)
    if not OTHERWISE_STREAMED & bad.params.keys():
        streamed = json.dumps({**body, "stream": True})
        again = app.post(dialect.path, content=streamed, headers=JSON)
        # Refused before the stream begins, and alike.
        assert dialect.error(again, 400) == error


def check_all(app: httpx.Client, cases: list[tuple[Dialect, Bad]]) -> None:
    """Raises one AssertionError that names every case that failed."""
    failed = []
    for dialect, bad in cases:
        try:
            check(app, dialect, bad)
        except (AssertionError, KeyError) as error:
            failed.append(f"{dialect} {str(bad)[:300]}: {error!r}")
    assert not failed, "\n".join(failed)


@pytest.mark.promise("Responses: unsupported parameters are refused by name")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
def test_a_bad_value_is_a_400_that_names_the_parameter(app: httpx.Client, dialect: Dialect) -> None:
    cases = []
    for parameter, values, code in BAD_EVERYWHERE:
        name = dialect.names.get(parameter, parameter)
        if parameter in dialect.lacking:
            code = UNSUPPORTED
        cases += [(dialect, Bad({name: value}, name, code)) for value in values]
    check_all(app, cases)


@pytest.mark.promise("Streaming: completions are validated and have defaults")
@pytest.mark.promise(
    "Grammars: a schema that cannot be enforced is a 400 with name and path, before anything is "
    "queued"
)
@pytest.mark.promise("Grammars: requests with a grammar are refused for workers without support")
@pytest.mark.parametrize("name", ONE_DIALECT)
def test_what_a_dialect_refuses_of_its_own_parameters(app: httpx.Client, name: str) -> None:
    check_all(app, [(DIALECTS[name], bad) for bad in ONE_DIALECT[name]])
