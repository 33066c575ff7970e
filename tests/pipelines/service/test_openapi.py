"""/openapi.json describes the routes that there are, and nothing that fits it brings a 5xx."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.routing import Route

from pipelines.service.openapi import document
from tests.pipelines.service.scripted import world


@pytest.fixture(scope="module")
def here():
    with world() as made:
        yield made


def routes(app: FastAPI):
    """Method and path of everything that is served, HEAD beside GET left out."""
    pending: list[Any] = list(app.routes)
    found: set[tuple[str, str]] = set()
    while pending:
        route = pending.pop()
        if isinstance(route, Route):
            path = re.sub(r":\w+\}", "}", route.path)
            found |= {(method.lower(), path) for method in route.methods or () if method != "HEAD"}
        else:
            pending += route.original_router.routes
    return found


def test_it_lists_exactly_the_routes_of_the_service(here):
    served = here.http.get("/openapi.json").json()
    described = {(method, path) for path, methods in served["paths"].items() for method in methods}
    assert described == routes(here.app)


def test_bodies_are_closed_where_unknown_fields_are_refused(here):
    schemas = document()["components"]["schemas"]
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert "include_blocks" in schemas["StreamOptions"]["properties"]
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "x"}], "colour": 1}
    assert here.http.post("/v1/chat/completions", json=body).status_code == 400


FEW = settings(
    max_examples=6,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_neither_what_fits_the_description_nor_what_does_not_is_ever_a_server_error(here, mode):
    # Imported here: it takes seconds, of every run of any test.
    import schemathesis
    from schemathesis import checks
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_url(f"{here.url}/openapi.json")
    kinds = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    asked = set()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @FEW
        @given(operation.as_strategy(schemathesis.GenerationMode(mode)))
        def ask(case):
            asked.add((case.operation.method.lower(), case.operation.path))
            case.call_and_validate(checks=kinds)

        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with it
            ask()
    bodies = {("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("post", "/v1/messages")}
    # It leaves out the document itself.
    assert asked >= (bodies if mode == "negative" else routes(here.app) - {("get", "/openapi.json")})
