"""Parsing of SGLang's responses. Those in `answers` were recorded from SGLang 0.5.23 on a CPU."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude import grammars
from etude.cli import main
from etude.errors import ConfigError, EngineError, MalformedRequest
from etude.inference.config import EngineConfig, EngineKind, Speculation
from etude.inference.errors import InvalidGrammar
from etude.inference.external import answers
from etude.inference.external.answers import AnswerPart, BrokenAnswer
from etude.inference.external.environment import MARK, SGLANG, Environment
from etude.inference.sglang import protocol
from etude.loop.config import FleetConfig, RunConfig
from etude.models.config import ModelConfig
from etude.numerics.config import Mode, NumericsConfig
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason, Traffic, Version
from etude.training.config import LearnerConfig

ANSWERS = Path(__file__).parent / "answers"
MODEL = ModelConfig(num_layers=3, num_experts=8, top_k=2, dense_layers=(1,))
OLD, NEW = (Version(step=step, incarnation="0a1b2c3d", digest=f"{step:064d}") for step in (3, 4))
IDS, PROMPT = [75, 217, 50, 2, 68], 40


def recorded(name: str) -> bytes:
    return (ANSWERS / name).read_bytes()


def changed(**fields: Any) -> bytes:
    """The recorded response with other fields in its meta data."""
    answer = json.loads(recorded("generate.json"))
    answer["meta_info"] |= fields
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
    return answers.make_completion(
        request(stop=stop),
        answer,
        server="SGLang",
        engine="engine-1",
        versions={0: OLD, 1: NEW},
        adoption=adoption,
        routes=routes,
    )


def test_a_recorded_answer_and_a_recorded_stream_are_the_same_completion() -> None:
    done = completed(whole_answer(recorded("generate.json"), engine="engine-1"))
    assert done.token_ids.tolist() == IDS
    assert done.logprobs[0] == np.float32(-4.2646002769470215)
    assert [(s.version, s.num_tokens, s.kv_epoch) for s in done.spans] == [(OLD, 5, 0)]
    assert (done.stop_reason, done.num_cached, done.engine) == (StopReason.LENGTH, 39, "engine-1")
    lines = recorded("stream.txt").splitlines(keepends=True)
    told = [part for line in lines if (part := protocol.read_event(line, engine="engine-1"))]
    assert [part.token_ids for part in told] == [[token] for token in IDS]
    again = completed(parts_together(told))
    assert (again.token_ids.tolist(), again.spans) == (IDS, done.spans)
    assert np.array_equal(again.logprobs, done.logprobs)
    assert [answers.is_end(line) for line in lines if line.strip()][-1]


def test_a_recorded_end_by_a_stop_token_is_one_and_a_recorded_text_has_its_log_probabilities() -> None:
    stopped = whole_answer(recorded("stopped.json"), engine="engine-1")
    assert completed(stopped, stop=(IDS[2],)).stop_reason is StopReason.STOP
    with pytest.raises(BrokenAnswer, match="an end by 'stop'"):
        completed(stopped)
    adoption, logprobs = protocol.read_scores(recorded("score.json"), [5, 6, 7, 8], engine="engine-1")
    assert (adoption, logprobs) == (0, [-5.501389503479004, -5.850438594818115, -5.875283241271973])
    with pytest.raises(BrokenAnswer, match="3 log-probabilities of 5 tokens"):
        protocol.read_scores(recorded("score.json"), [5, 6, 7, 8, 9], engine="engine-1")


def test_a_recorded_refusal_and_a_recorded_abort_say_what_sglang_said() -> None:
    said = answers.read_error("SGLang", 400, recorded("too_long.json"), engine="engine-1")
    assert said.what == "SGLang of engine-1 answered 400"
    assert "maximum context length of 257 tokens" in said.facts
    assert answers.read_error("SGLang", 400, b'{"error": "no such field"}', engine="e").facts == "no such field"
    assert answers.read_error("SGLang", 500, b"<html>", engine="e").facts == "b'<html>'"
    aborted = whole_answer(recorded("aborted.json"), engine="engine-1")
    assert (aborted.finish_reason, aborted.message, len(aborted.token_ids)) == ("abort", "Aborted", 30)
    assert aborted.spans == ((0, 30),)
    with pytest.raises(EngineError, match="answered 500"):
        protocol.read_event(b'data: {"error": {"message": "it fell over"}}', engine="engine-1")


@pytest.mark.parametrize(
    "fields",
    [
        {"finish_reason": None},
        {"output_token_logprobs": [[-1.0, 75, None]]},
        {"output_token_logprobs": [[None, token, None] for token in IDS]},
        {"weight_versions": []},
        {"weight_versions": [{"version": "default", "start": 0, "end": 5}]},
        {"weight_versions": [{"version": "0", "start": 1, "end": 5}]},
        {"weight_versions": [{"version": "7", "start": 0, "end": 5}]},
    ],
)
def test_an_answer_that_disagrees_with_itself_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(BrokenAnswer):
        completed(whole_answer(changed(**fields), engine="engine-1"))
    for cut in (0, 10, 100):
        with pytest.raises(BrokenAnswer):
            whole_answer(recorded("generate.json")[:cut], engine="engine-1")


def test_a_request_that_lived_through_a_swap_has_both_versions() -> None:
    told = [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 5}]
    done = completed(whole_answer(changed(weight_versions=told), engine="e"))
    assert [(s.version, s.num_tokens, s.kv_epoch) for s in done.spans] == [(OLD, 2, 0), (NEW, 3, 1)]


def test_a_request_to_sglang_has_its_stop_tokens_seed_salt_class_and_routes() -> None:
    body = json.loads(protocol.encode_request(request(stop=(7,)), "n", salt="a-1", native_routes=True))
    params = body["sampling_params"]
    assert (body["input_ids"], body["extra_key"], body["stream"]) == (list(range(PROMPT)), "a-1", True)
    assert (params["stop_token_ids"], params["ignore_eos"], body["return_logprob"]) == ([7], False, True)
    assert params["sampling_seed"] == answers.keyed_seed(0, PROMPT)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    plain = json.loads(protocol.encode_request(request(), "n", salt="a", native_routes=False))
    assert "return_routed_experts" not in plain
    assert plain["sampling_params"]["ignore_eos"]
    production = protocol.encode_request(request(traffic=Traffic.PRODUCTION), "n", salt="a", native_routes=False)
    assert json.loads(production)["priority"] > plain["priority"], "SGLang serves the higher number first"
    with pytest.raises(MalformedRequest, match="temperature 1e-07"):
        protocol.encode_request(request(temperature=1e-7), "n", salt="a", native_routes=False)


def test_routes_are_those_of_layers_with_a_router() -> None:
    told = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2) % 8
    routes = protocol.decode_routes(base64.b64encode(told.tobytes()).decode(), MODEL, count=4)
    assert routes.dtype == MODEL.route_dtype
    assert np.array_equal(routes, told[:, [0, 2]])
    assert answers.any_missing(protocol.decode_routes(None, MODEL, count=4))
    with pytest.raises(ValueError, match="routes of 5 positions"):
        protocol.decode_routes(base64.b64encode(told.tobytes()).decode(), MODEL, count=5)
    with pytest.raises(ValueError, match="names expert 263, but the model has 8 experts"):
        protocol.decode_routes(base64.b64encode((told + 256).tobytes()).decode(), MODEL, count=4)


def test_another_version_is_refused_and_so_is_an_install_for_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang-0.4.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.4\nName: sglang\nVersion: 0.4.1\n")
    (tmp_path / MARK).write_text('{"device": "cpu"}')
    with pytest.raises(EngineError, match=r"SGLang 0\.4\.1 in .* was not tested") as caught:
        Environment(tmp_path, SGLANG).require()
    assert f"works with SGLang {SGLANG.version}" in caught.value.facts
    assert "etude engines install sglang" in caught.value.hint
    assert main(["engines", "install", "sglang", "--folder", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert "SGLang is not installed for cpu" in said
    assert "hint: take vLLM on a CPU" in said
    assert not (tmp_path / "new").exists()


def test_a_run_with_sglang_is_neither_exact_nor_given_adapters() -> None:
    fleet, native = FleetConfig(engines=(EngineKind.SGLANG,)), NumericsConfig(mode=Mode.NATIVE)
    RunConfig(fleet=fleet, numerics=native)
    with pytest.raises(ConfigError, match="sglang") as caught:
        RunConfig(fleet=fleet, numerics=native, learner=LearnerConfig(lora_rank=4))
    assert "SGLang cannot load the adapters" in caught.value.facts
    with pytest.raises(ConfigError, match="sglang") as caught:
        RunConfig(fleet=fleet, numerics=NumericsConfig(mode=Mode.EXACT))
    assert "uses its own order of summation" in caught.value.facts


@pytest.mark.parametrize("kind", [EngineKind.SGLANG, EngineKind.VLLM])
def test_the_speculation_of_reference_engines_is_refused_for_others(kind: EngineKind) -> None:
    fleet, native = FleetConfig(engines=(EngineKind.REFERENCE, kind)), NumericsConfig(mode=Mode.NATIVE)
    with pytest.raises(ConfigError, match=kind) as caught:
        RunConfig(fleet=fleet, numerics=native, engine=EngineConfig(speculation=Speculation.LOOK_UP))
    assert "has no engine.speculation = 'look-up'" in caught.value.facts


def asked(**sampling: Any) -> CompletionRequest:
    own = {"max_tokens": 5, "stop_token_ids": (), **sampling}
    return msgspec.structs.replace(request(), sampling=Sampling(**own))


def sent(**sampling: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(protocol.encode_request(asked(**sampling), "n", salt="a", native_routes=False))
    return found


def test_further_sampling_parameters_have_sglangs_own_names() -> None:
    given = {"top_p": 0.9, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5}
    params = sent(**given, min_tokens=2, logit_bias=((3, -1.5),))["sampling_params"]
    assert {name: params[name] for name in given} == given
    assert (params["top_k"], params["min_new_tokens"], params["logit_bias"]) == (-1, 2, {"3": -1.5})
    assert sent(top_k=4)["sampling_params"]["top_k"] == 4
    plain = sent()
    assert (
        not {*given, "top_k", "min_new_tokens", "logit_bias", "regex", "json_schema"} & plain["sampling_params"].keys()
    )
    assert "top_logprobs_num" not in plain


def test_grammars_are_schemas_or_patterns_and_lark_is_refused_by_name() -> None:
    assert sent(grammar=grammars.any_json_object())["sampling_params"]["json_schema"] == '{"type":"object"}'
    assert sent(grammar=grammars.from_regex("a+"))["sampling_params"]["regex"] == "a+"
    with pytest.raises(InvalidGrammar, match="SGLang does not support Lark grammars"):
        sent(grammar=grammars.from_lark('start: "a"'))


def test_the_likeliest_tokens_are_read() -> None:
    assert sent(top_logprobs=2)["top_logprobs_num"] == 2
    rows = [[[-0.5, 1, None], [-1.0, 2, None]]] * 5
    answer = whole_answer(changed(output_top_logprobs=rows), engine="e")
    routes = answers.decode_kept_routes(None, MODEL, start=0, stop=PROMPT + 4)
    common: dict[str, Any] = {"server": "SGLang", "engine": "e", "versions": {0: OLD}, "adoption": 0, "routes": routes}
    done = answers.make_completion(asked(top_logprobs=2), answer, **common)
    assert (done.top_ids.tolist(), done.top_logprobs.tolist()) == ([[1, 2]] * 5, [[-0.5, -1.0]] * 5)
    with pytest.raises(BrokenAnswer, match="asked for 3"):
        answers.make_completion(asked(top_logprobs=3), answer, **common)
