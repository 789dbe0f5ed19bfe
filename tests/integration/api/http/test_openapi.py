"""Whatever the document allows, and what it does not: no 5xx, no status that it does not name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.api_document import operations, path_of_something
from tests.support.running_service import MODEL, RunningService
from tests.support.scripted_worker import Script

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TIMEOUT_S = 60
# This server has no replica to wait for, and its worker scores no prompt.
EXCUSES = ("of 1 replicas", "no log probabilities of its prompt")
BOUNDED = settings(
    max_examples=12,
    derandomize=True,  # every run is the same run
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
ENDLESS = "GET /v1/deployment/stream"  # for minutes; it has tests of its own
# Requests that keep to the document, and, where there is something to get wrong, those that do not.
CASES = [
    *((route, GenerationMode.POSITIVE) for route, _ in operations() if route != ENDLESS),
    *(
        (route, GenerationMode.NEGATIVE)
        for route, operation in operations()
        if route != ENDLESS
        and (
            "requestBody" in operation
            or any(
                one["in"] != "path" and one["schema"] != {"type": "string"}  # any text fits it
                for one in operation.get("parameters", ())
            )
        )
    ),
]


@pytest.fixture(scope="module")
def schema(shared_service: RunningService) -> BaseSchema:
    """The document as the running service gives it."""
    shared_service.worker.script = Script(tokens_per_step=64)
    return schemathesis.openapi.from_url(f"{shared_service.base_url}/openapi.json")


@pytest.fixture(scope="module")
def names(shared_service: RunningService) -> dict[str, str]:
    """Of things that are there, by the path under which they are."""
    shared_service.worker.script = Script(tokens_per_step=64)
    url = shared_service.base_url
    job = httpx.post(f"{url}/generate", json={"prompt": "a", "stream": False}, timeout=TIMEOUT_S)
    body = {"model": MODEL, "input": "a", "max_output_tokens": 5}
    response = httpx.post(f"{url}/v1/responses", json=body, timeout=TIMEOUT_S)
    return {
        "/v1/jobs/": job.json()["id"],
        "/v1/responses/": response.json()["id"],
        "/v1/models/": MODEL,
    }


@pytest.mark.promise(
    "Clients: every route is documented, accepts no other bodies than documented ones, and returns "
    "only documented statuses and bodies"
)
# The service draws from `random` too, on a thread of this process, while a strategy draws.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize(("route", "mode"), CASES)
def test_every_answer_is_one_that_the_document_names(
    schema: BaseSchema, names: dict[str, str], route: str, mode: GenerationMode
) -> None:
    method, path = route.split()
    strategy = schema[path][method].as_strategy(generation_mode=mode)
    statuses: set[int] = set()

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        try:
            return draw(strategy)
        except InvalidSchema:  # it thought of a violation for which it finds no value
            reject()

    @BOUNDED
    @given(case=cases(), known=st.booleans())
    def send(case: Case, known: bool) -> None:
        if known:
            name_what_is_there(case, names)
        response = case.call(timeout=TIMEOUT_S)
        is_excused = response.status_code == 503 and any(text in response.text for text in EXCUSES)
        checks = CHECKS[1:] if is_excused else CHECKS
        case.validate_response(response, checks=checks)
        statuses.add(response.status_code)

    send()
    assert statuses


def name_what_is_there(case: Case, names: dict[str, str]) -> None:
    """A random name leads to nothing but 404s."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    for prefix, name in names.items():
        if case.path.startswith(prefix):
            for parameter in case.path_parameters or {}:
                case.path_parameters[parameter] = name


def test_methods_that_are_not_documented_are_not_there(
    shared_service: RunningService,
    schema: BaseSchema,
) -> None:
    paths: dict[str, Any] = schema.raw_schema["paths"]
    with httpx.Client(base_url=shared_service.base_url, timeout=TIMEOUT_S) as client:
        for path, item in paths.items():
            allowed = {method.upper() for method in item}
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - allowed:
                answer = client.request(method, path_of_something(path))
                assert answer.status_code == 405, f"{method} {path}"
                assert set(answer.headers["allow"].split(", ")) == allowed, f"{method} {path}"
                assert answer.json()["error"]["message"]
