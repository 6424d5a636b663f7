"""Parsing of vLLM's responses. Those in `answers` were recorded from vLLM 0.32 on a CPU, except for the paths in
them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude import grammars
from etude.errors import EngineError, MalformedRequest
from etude.inference.errors import InvalidGrammar
from etude.inference.external import answers
from etude.inference.external.answers import AnswerPart, BrokenAnswer
from etude.inference.vllm import protocol
from etude.models.config import ModelConfig
from etude.records.completion import (
    Completion,
    CompletionRequest,
    Sampling,
    StopReason,
    Traffic,
    Version,
    missing_route,
)

ANSWERS = Path(__file__).parent / "answers"
MODEL = ModelConfig(num_layers=3, num_experts=8, top_k=2, dense_layers=(1,))
OLD, NEW = (Version(step=step, incarnation="0a1b2c3d", digest=f"{step:064d}") for step in (3, 4))
IDS, PROMPT = [198, 3, 10, 214, 142], 40


def recorded(name: str) -> bytes:
    return (ANSWERS / name).read_bytes()


def changed(**fields: Any) -> bytes:
    """The recorded response with other fields in its choice."""
    answer = json.loads(recorded("generate.json"))
    answer["choices"][0] |= fields
    return json.dumps(answer).encode()


def request(**fields: Any) -> CompletionRequest:
    sampling = Sampling(max_tokens=5, stop_token_ids=fields.pop("stop", ()), temperature=fields.pop("temperature", 1.0))
    ids = np.arange(PROMPT, dtype=np.int32)
    return CompletionRequest(request_id="r", session_id="s", prompt_ids=ids, sampling=sampling, **fields)


def whole_answer(body: bytes, *, engine: str) -> AnswerPart:
    """A recorded complete response, as the only event of a stream."""
    part = protocol.read_event(b"data: " + body, engine=engine)
    assert part is not None
    return part


def parts_together(told: Iterable[AnswerPart]) -> AnswerPart:
    whole = answers.JoinedAnswer()
    for part in told:
        whole.add(part)
    return whole.part


def completed(answer: AnswerPart, *, adoption: int = 0, stop: tuple[int, ...] = ()) -> Completion:
    routes = answers.decode_kept_routes(None, MODEL, start=0, stop=PROMPT + len(answer.token_ids) - 1)
    versions = {0: OLD, 1: NEW}
    return answers.make_completion(
        request(stop=stop),
        answer,
        server="vLLM",
        engine="engine-1",
        versions=versions,
        adoption=adoption,
        routes=routes,
    )


def test_a_recorded_answer_is_a_completion() -> None:
    done = completed(whole_answer(recorded("generate.json"), engine="engine-1"))
    assert done.token_ids.tolist() == IDS
    assert done.logprobs[0] == np.float32(-5.037752151489258)
    assert [(s.version, s.num_tokens, s.kv_epoch) for s in done.spans] == [(OLD, 5, 0)]
    assert (done.stop_reason, done.num_cached, done.engine) == (StopReason.LENGTH, 32, "engine-1")
    assert len(done.routes) == PROMPT + 4
    assert answers.any_missing(done.routes)


def test_a_recorded_stream_is_the_same_part_after_part() -> None:
    lines = recorded("stream.txt").splitlines(keepends=True)
    told = [part for line in lines if (part := protocol.read_event(line, engine="engine-1"))]
    whole = parts_together(told)
    assert [part.token_ids for part in told[:5]] == [[token] for token in IDS]
    assert whole == whole_answer(recorded("generate.json"), engine="engine-1")
    assert [answers.is_end(line) for line in lines if line.strip()][-1]


def test_a_recorded_text_has_a_log_probability_for_each_token_but_the_first() -> None:
    adoption, logprobs = protocol.read_scores(recorded("score.json"), [5, 6, 7, 8], engine="engine-1")
    assert (adoption, logprobs) == (0, [-5.501389503479004, -5.850438117980957, -5.875283241271973])
    with pytest.raises(BrokenAnswer, match=r"2 log-probabilities of 4 tokens"):
        protocol.read_scores(recorded("score.json"), [5, 6, 9, 8], engine="engine-1")


def test_a_recorded_refusal_says_what_vllm_said() -> None:
    error = answers.read_error("vLLM", 400, recorded("too_long.json"), engine="engine-1")
    assert "vLLM of engine-1 answered 400" in error.what
    assert error.facts.startswith("The decoder prompt (length 300) is longer")


def test_a_refusal_within_a_stream_has_its_own_status() -> None:
    refusal = b'data: {"error": {"message": "Grammar error", "type": "BadRequestError", "param": null, "code": 400}}\n'
    with pytest.raises(MalformedRequest, match="answered 400: Grammar error"):
        protocol.read_event(refusal, engine="engine-1")
    with pytest.raises(EngineError, match="answered 500: Internal server error") as found:
        protocol.read_event(b'data: {"error": {"message": "Internal server error", "code": 500}}\n', engine="engine-1")
    assert not isinstance(found.value, MalformedRequest)


@pytest.mark.parametrize("cut", range(0, 1200, 97))
def test_a_truncated_answer_is_an_error(cut: int) -> None:
    with pytest.raises(BrokenAnswer):
        whole_answer(recorded("generate.json")[:cut], engine="engine-1")


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": IDS[:4]},
        {"token_ids": None},
        {"token_ids": [*IDS[:4], 7]},
        {"token_ids": "198"},
        {"logprobs": None},
        {"logprobs": {"content": None}},
        {"finish_reason": None},
        {"finish_reason": "error"},
        {"weight_versions": None},
        {"weight_versions": [{"version": "default", "start": 0, "end": 5}]},
        {"weight_versions": [{"version": "0", "start": 0, "end": 4}]},
        {"weight_versions": [{"version": "0", "start": 1, "end": 5}]},
        {"weight_versions": [{"version": "7", "start": 0, "end": 5}]},
    ],
    ids=str,
)
def test_an_answer_that_disagrees_with_itself_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(BrokenAnswer, match="engine-1"):
        completed(whole_answer(changed(**fields), engine="engine-1"))


def test_an_answer_with_two_choices_is_an_error_and_one_without_choices_is_no_completion() -> None:
    answer = json.loads(recorded("generate.json"))
    with pytest.raises(BrokenAnswer, match="2 choices"):
        whole_answer(json.dumps(answer | {"choices": 2 * answer["choices"]}).encode(), engine="engine-1")
    with pytest.raises(BrokenAnswer, match="0 tokens"):
        completed(whole_answer(json.dumps(answer | {"choices": []}).encode(), engine="engine-1"))


def test_a_request_that_vllm_ended_by_an_error_raises_and_one_that_was_aborted_keeps_its_tokens() -> None:
    aborted = completed(whole_answer(changed(finish_reason="abort"), engine="engine-1"))
    assert (aborted.token_ids.tolist(), aborted.stop_reason) == (IDS, StopReason.LENGTH)
    with pytest.raises(EngineError, match="answered 500"):
        protocol.read_event(b'data: {"error": {"message": "it fell over"}}', engine="engine-1")


def test_a_log_probability_that_is_no_number_is_an_error() -> None:
    content = json.loads(recorded("generate.json"))["choices"][0]["logprobs"]["content"]
    content[2]["logprob"] = answers.NON_FINITE_LOGPROB
    with pytest.raises(BrokenAnswer, match="is not finite"):
        completed(whole_answer(changed(logprobs={"content": content}), engine="engine-1"))


def test_an_end_is_by_a_token_that_was_asked_for() -> None:
    stopped = whole_answer(changed(finish_reason="stop"), engine="engine-1")
    assert completed(stopped, stop=(IDS[-1],)).stop_reason is StopReason.STOP
    with pytest.raises(BrokenAnswer, match="an end by 'stop'"):
        completed(stopped)


@pytest.mark.parametrize(
    ("adoption", "told", "spans"),
    [
        (0, [("0", 0, 2), ("1", 2, 5)], [(OLD, 2, 0), (NEW, 3, 1)]),
        (0, [("1", 0, 5)], [(OLD, 0, 0), (NEW, 5, 1)]),  # it may have read its prompt before the swap
        (1, [("1", 0, 5)], [(NEW, 5, 0)]),
    ],
)
def test_spans_count_the_swaps_that_a_request_lived_through(
    adoption: int, told: list[tuple[str, int, int]], spans: list[tuple[Version, int, int]]
) -> None:
    versions = [{"version": v, "start": start, "end": end} for v, start, end in told]
    done = completed(whole_answer(changed(weight_versions=versions), engine="e"), adoption=adoption)
    assert [(s.version, s.num_tokens, s.kv_epoch) for s in done.spans] == spans


def test_a_request_to_vllm_has_its_stop_tokens_seed_and_salt() -> None:
    body = json.loads(protocol.encode_request(request(stop=(7,)), "n", salt="a-1", native_routes=True))
    params = body["sampling_params"]
    assert (body["token_ids"], body["cache_salt"], body["stream"]) == (list(range(PROMPT)), "a-1", True)
    assert (params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == ([7], True, 0)
    assert params["seed"] == answers.keyed_seed(0, PROMPT)
    assert params["routed_experts_prompt_start"] == 0
    production = protocol.encode_request(request(traffic=Traffic.PRODUCTION), "n", salt="a", native_routes=False)
    assert json.loads(production)["priority"] < body["priority"], "vLLM serves the lower number first"


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    protocol.encode_request(request(temperature=0.0), "n", salt="a", native_routes=False)
    with pytest.raises(MalformedRequest, match=r"temperature 0\.005"):
        protocol.encode_request(request(temperature=0.005), "n", salt="a", native_routes=False)


def test_routes_that_were_kept_begin_where_they_are_wanted_and_say_where_none_are() -> None:
    every = np.arange(6 * 2 * 2, dtype="<i2").reshape(6, 2, 2) % 8
    routes = answers.decode_kept_routes(base64.b64encode(every.tobytes()).decode(), MODEL, start=2, stop=8)
    assert routes.dtype == np.uint8
    assert np.array_equal(routes[:4], every[2:])
    assert (routes[4:] == 255).all()


@pytest.mark.parametrize(("num_experts", "last"), [(8, 7), (255, 254), (256, 255), (384, 383)])
def test_every_expert_keeps_its_number_and_none_becomes_a_missing_one(num_experts: int, last: int) -> None:
    of = replace(MODEL, num_experts=num_experts)
    numbers = np.array([last, -1] * (len(of.moe_layers)), "<i2").reshape(1, -1, 2)
    kept = answers.decode_kept_routes(base64.b64encode(numbers.tobytes()).decode(), of, start=0, stop=1)
    assert (kept[..., 0] == last).all()
    assert (kept[..., 1] == missing_route(of.route_dtype)).all()
    with pytest.raises(ValueError, match=f"names expert {num_experts}, but the model has {num_experts} experts"):
        answers.decode_kept_routes(base64.b64encode((numbers + 1).tobytes()).decode(), of, start=0, stop=1)
    packed = io.BytesIO()
    np.save(packed, np.full((1, of.num_layers, 2), last, np.int32))
    assert (protocol.decode_routes(base64.b64encode(packed.getvalue()).decode(), of, count=1) == last).all()
    np.save(packed := io.BytesIO(), np.full((1, of.num_layers, 2), 256 + num_experts, np.int32))
    with pytest.raises(ValueError, match="a route names expert"):
        protocol.decode_routes(base64.b64encode(packed.getvalue()).decode(), of, count=1)


def test_routes_that_the_build_tells_are_those_of_layers_with_a_router() -> None:
    every, packed = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) % 8, io.BytesIO()
    np.save(packed, every)
    told = base64.b64encode(packed.getvalue()).decode()
    assert np.array_equal(protocol.decode_routes(told, MODEL, count=4), every[:, [0, 2]])
    with pytest.raises(ValueError, match=r"routes have shape \[4, 3, 2\], expected \[5, "):
        protocol.decode_routes(told, MODEL, count=5)


def asked(**sampling: Any) -> CompletionRequest:
    own = {"max_tokens": 5, "stop_token_ids": (7,), **sampling}
    return msgspec.structs.replace(request(), sampling=Sampling(**own))


def test_further_sampling_parameters_have_vllms_own_names() -> None:
    given = {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.25,
             "repetition_penalty": 1.5, "min_tokens": 2}  # fmt: skip
    body = protocol.encode_request(asked(**given, logit_bias=((3, -1.5),)), "n", salt="a", native_routes=False)
    params = json.loads(body)["sampling_params"]
    assert {name: params[name] for name in given} == given
    assert params["logit_bias"] == {"3": -1.5}
    plain = json.loads(protocol.encode_request(asked(), "n", salt="a", native_routes=False))["sampling_params"]
    assert not {*given, "logit_bias", "structured_outputs"} & plain.keys(), "a plain request is sent as before"


def test_grammars_are_sent_as_lark_that_ends_with_the_requests_stop_tokens() -> None:
    def sent(grammar: str) -> Any:
        body = protocol.encode_request(
            asked(grammar=grammar, stop_token_ids=(7, 3)), "n", salt="a", native_routes=False
        )
        return json.loads(body)["sampling_params"]["structured_outputs"]

    assert sent(grammars.from_regex("a/b")) == {"grammar": "start: sentence (<[7]> | <[3]>)\nsentence: /a\\/b/"}
    lark = sent(grammars.from_lark('start: "a"'))["grammar"]
    assert lark == 'start: sentence (<[7]> | <[3]>)\nsentence: %lark {\nstart: "a"\n}'
    with pytest.raises(InvalidGrammar, match="no JSON is valid"):
        sent(grammars.from_json_schema(False))


def test_the_likeliest_tokens_are_read_with_or_without_the_sampled_one() -> None:
    content = json.loads(recorded("generate.json"))["choices"][0]["logprobs"]["content"]
    for token in content:
        token["top_logprobs"] = [
            token["top_logprobs"][0],
            {"token_id": 1, "logprob": -0.5},
            {"token_id": 2, "logprob": -1},
        ]
    answer = whole_answer(changed(logprobs={"content": content}), engine="e")
    routes = answers.decode_kept_routes(None, MODEL, start=0, stop=PROMPT + 4)
    common: dict[str, Any] = {"server": "vLLM", "engine": "e", "versions": {0: OLD}, "adoption": 0, "routes": routes}
    done = answers.make_completion(asked(top_logprobs=2, stop_token_ids=()), answer, **common)
    assert done.top_ids.tolist() == [[1, 2]] * 5
    assert done.top_logprobs.tolist() == [[-0.5, -1.0]] * 5
    with pytest.raises(EngineError, match="asked for 4"):
        answers.make_completion(asked(top_logprobs=4, stop_token_ids=()), answer, **common)
    body = json.loads(protocol.encode_request(asked(top_logprobs=2), "n", salt="a", native_routes=False))
    assert body["sampling_params"]["logprobs"] == 2
