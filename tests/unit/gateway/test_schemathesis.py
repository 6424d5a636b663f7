"""Requests that schemathesis makes of the gateway's OpenAPI document: some fit it, others do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.unit.gateway.sdk import MODEL, qwen
from tests.unit.gateway.test_fuzz import Babbling

from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.signals import FeedbackWriter

SETTINGS = partial(
    settings, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
GETS = ("/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/{name}")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The operations of a gateway that a thread serves, made of its document."""
    config = GatewayConfig(port=0, remembered_tokens=20_000, drain_s=1.0)
    loop, ready, url = asyncio.new_event_loop(), threading.Event(), ""
    feedback = FeedbackWriter(tmp_path_factory.mktemp("signals") / "signals")

    async def work() -> None:
        nonlocal url
        model = ServedModel(Babbling(), qwen(), name=MODEL, context_tokens=3000, config=config)
        app = create_app([model], config=config, feedback=feedback)
        async with serving(app, config=config) as base:
            url = base.removesuffix("/v1")
            ready.set()
            await ended.wait()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    try:
        assert ready.wait(60), "the gateway has not started"
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()
        feedback.close()


@pytest.mark.parametrize("num", [6, pytest.param(1_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("path", [*BODIES, "/v1/feedback"])
def test_requests_by_the_document_are_answered_as_it_says(api: Any, path: str, num: int) -> None:
    """Those that fit it, and those that do not: no status, content type or body but the declared ones, none of the
    class 500, and no body that does not fit is taken."""

    def ask(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, response.text
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    operation = api[path]["POST"]
    for mode in GenerationMode:
        cases = given(case=operation.as_strategy(generation_mode=mode))
        seed(num)(SETTINGS(max_examples=num)(cases(ask)))()


@pytest.mark.parametrize("path", BODIES)
def test_answers_whole_and_streamed_are_as_the_document_says(api: Any, path: str) -> None:
    for more in ({}, {"stream": True}):
        case = api[path]["POST"].Case(body={"model": MODEL, **BODIES[path], **more}, media_type="application/json")
        assert case.call_and_validate().status_code == 200


@pytest.mark.parametrize("path", GETS)
def test_what_is_read_is_as_the_document_says(api: Any, path: str) -> None:
    case = api[path]["GET"].Case(path_parameters={"name": MODEL} if "{" in path else {})
    assert case.call_and_validate().status_code == 200
