"""The doctor at a URL: our engine's server shows its operators; vLLM answers in its own form; bad answers are named.

vLLM itself runs in an environment of its own (see docs/guides/numerics.md); here a small server gives answers of the
form that vLLM 0.32 gave.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.evals.test_doctor import F32, PROMPTS, changed, model, stale
from tests.unit.gateway.test_gateway import served

from etude.errors import EngineError
from etude.evals.doctor.diagnosis import Verdict, examine
from etude.evals.doctor.remote import RemoteReferenceEngine, VllmEngine, at_url
from etude.evals.doctor.sides import NO_VERSION, LearnerSide
from etude.evals.parity import Budget
from etude.inference.app import build_app
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.operator_trace import as_tensor, as_wire
from etude.inference.server import _parser
from etude.inference.wire import OperatorResult

BUDGET = Budget(k3=1e-9, ratio_p99=1e-3)


@contextmanager
def our_server(served: torch.nn.Module, *, show_operators: bool) -> Iterator[str]:
    """Our engine on a port of loopback, in a thread of its own."""
    engine = ReferenceEngine(served, version=NO_VERSION, config=EngineConfig(context_tokens=64))  # type: ignore[arg-type]
    app = build_app(engine, operators=engine.operators if show_operators else None)
    config = uvicorn.Config(app, ws="none", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    up = threading.Event()

    async def run() -> None:
        async with engine:
            task = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
            up.set()
            await task

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert up.wait(300), "the server did not start within 300 s"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def test_our_engine_at_a_url_is_examined_and_a_stale_weight_in_it_named() -> None:
    with our_server(changed(stale)(F32), show_operators=True) as url:
        engine = at_url(url)
        assert isinstance(engine, RemoteReferenceEngine)
        found = examine(engine, LearnerSide(model(F32)), PROMPTS, max_tokens=6, seed=0, exact=False, budget=BUDGET)
    assert [way.way for way in found.ways] == ["batched", "alone", "cached"]
    assert found.verdict is Verdict.OFF
    assert found.findings[0].name == "layers.1.attention.out"


def test_an_engine_that_was_not_started_to_show_its_operators_is_examined_without_them() -> None:
    with our_server(model(F32), show_operators=False) as url:
        found = examine(at_url(url), LearnerSide(model(F32)), PROMPTS, max_tokens=6, seed=0, exact=False, budget=BUDGET)
    assert not found.shown
    assert found.verdict is not Verdict.OFF


def test_an_unreachable_server_is_an_error_with_its_address() -> None:
    with pytest.raises(EngineError, match="is not a supported engine"):
        at_url("http://127.0.0.1:9")


def test_etudes_own_gateway_is_known_and_what_to_start_instead_is_said() -> None:
    async def ask() -> None:
        async with served() as (_, _, url):
            await asyncio.to_thread(at_url, url)

    with pytest.raises(EngineError, match="is the gateway of etude") as caught:
        asyncio.run(ask())
    said = re.search(r"python -m etude.inference.server (.*)", caught.value.hint)
    assert said is not None
    assert _parser().parse_args(said[1].split()).show_operators


class Answers(BaseHTTPRequestHandler):
    """vLLM's form."""

    change: Any = staticmethod(lambda body: body)

    def do_GET(self) -> None:
        self._say(200 if self.path == "/v1/models" else 404, {"object": "list", "data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = [(7 * len(asked["prompt"]) + i) % 97 for i in range(asked["max_tokens"])]
        said = {"tokens": ["a"] * len(ids), "token_logprobs": [-1.5] * len(ids), "top_logprobs": None}
        choice = {"index": 0, "text": "", "token_ids": ids, "prompt_token_ids": asked["prompt"], "logprobs": said}
        self._say(200, self.change({"id": "c", "model": asked["model"], "choices": [choice]}))

    def _say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def vllm_like(change: Any = lambda body: body) -> Iterator[str]:
    handler = type("Changed", (Answers,), {"change": staticmethod(change)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_vllm_is_known_by_its_models_and_its_tokens_and_log_probabilities_are_taken() -> None:
    with vllm_like() as url:
        engine = at_url(url)
        assert isinstance(engine, VllmEngine)
        sampled = engine.sample("batched", PROMPTS, max_tokens=5, seed=0)
    assert [len(s.token_ids) - s.num_prompt for s in sampled] == [5, 5, 5]
    assert sampled[0].logprobs.tolist() == [-1.5] * 5
    assert engine.results([1, 2], prompt_tokens=1) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda body: [],
        lambda body: {"choices": []},
        lambda body: {"choices": [{**body["choices"][0], "token_ids": None}]},
        lambda body: {"choices": [{**body["choices"][0], "token_ids": [1]}]},
        lambda body: {"choices": [{**body["choices"][0], "token_ids": [-1, 2, 3, 4, 5]}]},
        lambda body: {"choices": [{**body["choices"][0], "logprobs": {"token_logprobs": [None] * 5}}]},
    ],
)
def test_an_answer_of_another_form_is_refused(change: Any) -> None:
    with vllm_like(change) as url, pytest.raises(EngineError, match="without token ids and their log-probabilities"):
        VllmEngine(url, "m").sample("alone", PROMPTS[:1], max_tokens=5, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_results_travel_to_the_bit(dtype: torch.dtype) -> None:
    sent = {"layers.0.x": torch.arange(-6, 6).reshape(4, 3).to(dtype)}
    back = {one.name: as_tensor(one) for one in as_wire(sent)}
    assert torch.equal(back["layers.0.x"], sent["layers.0.x"])
    assert back["layers.0.x"].dtype is dtype


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "float99", ""]),
    shape=st.lists(st.integers(-3, 5), max_size=4),
    data=st.binary(max_size=64),
)
def test_wild_results_are_tensors_or_refused(dtype: str, shape: list[int], data: bytes) -> None:
    try:
        tensor = as_tensor(OperatorResult(name="x", dtype=dtype, shape=tuple(shape), data=data))
    except EngineError:
        return
    assert tensor.nbytes == len(data)
    assert list(tensor.shape) == shape


def test_results_are_a_record_of_the_wire() -> None:
    (one,) = as_wire({"a": torch.ones(2)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=OperatorResult) == one
