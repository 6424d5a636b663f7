from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from tests.unit.harness.tokeniser import laptop_chat

from etude.capture.streams import StreamedText
from etude.gateway import ChatRequest, RequestRefused, make_answer
from etude.gateway.dialects import messages, responses
from etude.gateway.dialects.chat import NEUTRAL_OF_CHAT
from etude.gateway.dialects.chat import read as read_request
from etude.gateway.dialects.shared import HARMLESS
from etude.gateway.dialects.text import NEUTRAL_OF_TEXT
from etude.gateway.dialects.text import read as read_text_request
from etude.harness import standard_tools
from etude.records import Completion, Sampling
from etude.records.completion import StopReason, VersionSpan
from etude.testing import make_version

GOOD = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"role": "user", "content": "hi", "name": "somebody"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "a.py"},
    ],
    "tools": [{"type": "function", "function": {"name": "ls"}}],
    "max_tokens": 5,
    "temperature": 0,
    "stop": "x",
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "user": "somebody",
}
OF_OTHER_SERVERS = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "ignore_eos": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "stop_token_ids": [7],
}


OFFERED = {"top_p", "n", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"}
OFFERED_OF_CHAT = OFFERED | {"top_logprobs", "response_format", "tool_choice", "parallel_tool_calls"}


def read(**changes: object) -> ChatRequest:
    return read_request(json.dumps({**GOOD, **changes}).encode())


def test_messages_are_parsed_to_text_and_calls_with_dict_arguments() -> None:
    request = read()
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": {}}}],
        },
        {"role": "tool", "content": "a.py", "tool_call_id": "1"},
    ]
    assert (request.stop, request.stream, request.include_usage, request.max_tokens) == (("x",), True, True, 5)
    assert request.temperature == 0.0


def test_tools_that_the_client_forbids_are_not_offered() -> None:
    assert read(tool_choice="none").tools == []
    assert len(read(tool_choice="auto").tools) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "ls"}}]}]},
            "messages[0].tool_calls",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
    ],
)
def test_a_wrong_request_names_the_field(changes: dict[str, object], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(**changes)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("reader", "field", "value", "says"),
    [
        (read_request, "functions", [{"name": "ls"}], "functions = "),
        (read_request, "audio", {"voice": "x"}, "only null is accepted"),
        (read_request, "modalities", ["audio"], "is not supported by this model: "),
        (read_text_request, "best_of", 3, "\n  hint: leave best_of out"),
        (read_text_request, "bad_words", [str(i) for i in range(99)], "is not supported"),
        *((read_request, name, value, "is not supported") for name, value in OF_OTHER_SERVERS.items()),
        *((read_text_request, name, value, "is not supported") for name, value in OF_OTHER_SERVERS.items()),
    ],
)
def test_a_field_that_is_not_offered_is_refused_in_three_parts(
    reader: Callable[[bytes], Any], field: str, value: object, says: str
) -> None:
    asked = {"prompt": "x"} if reader is read_text_request else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "m", **asked}
    for harmless in (None, *(NEUTRAL_OF_TEXT if reader is read_text_request else NEUTRAL_OF_CHAT)[field]):
        reader(json.dumps(body | {field: harmless}).encode())
    with pytest.raises(RequestRefused) as refused:
        reader(json.dumps(body | {field: value}).encode())
    message = refused.value.message
    assert refused.value.param == field
    assert says in message
    assert message.startswith(f"{field} = ")
    assert f"\n  hint: leave {field} out" in message
    assert len(message) < 300


@pytest.mark.parametrize("reader", [read_request, read_text_request])
def test_a_parameter_that_nobody_knows_is_refused_by_its_name(reader: Callable[[bytes], Any]) -> None:
    asked = {"prompt": "x"} if reader is read_text_request else {"messages": [{"role": "user", "content": "x"}]}
    for name, hint in (("max_token", "did you mean 'max_tokens'?"), ("nonsense_of_mine", "leave it out"), ("", "")):
        with pytest.raises(RequestRefused, match="Unknown parameter") as refused:
            reader(json.dumps({"model": "m", **asked, name: None}).encode())
        assert (refused.value.status, refused.value.param, refused.value.code) == (400, name, "unknown_parameter")
        assert hint in refused.value.message
        assert len(refused.value.message) < 300


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_clients_send_beside_their_question_is_accepted(name: str) -> None:
    assert read(**{name: {"some": "value"}}) == read()


@pytest.mark.parametrize(
    ("params", "fields", "neutral"),
    [
        (ChatParams, {*GOOD, "seed", "max_completion_tokens", *OFFERED_OF_CHAT}, NEUTRAL_OF_CHAT),
        (TextParams, {*GOOD, "prompt", "seed", *OFFERED}, NEUTRAL_OF_TEXT),
    ],
)
def test_every_parameter_of_openais_client_is_honoured_accepted_or_refused_for_a_reason(
    params: type, fields: set[str], neutral: dict[str, tuple[Any, ...]]
) -> None:
    known = {name for base in params.__mro__ for name in getattr(base, "__annotations__", ())}
    assert known - fields - neutral.keys() - HARMLESS == set()


def test_a_call_of_the_old_form_is_refused_where_it_stands() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": "{}"}}
    with pytest.raises(RequestRefused) as refused:
        read(messages=[called, {"role": "user", "content": "x"}])
    assert refused.value.param == "messages[0].function_call"


def test_the_guide_lists_every_field_that_is_not_supported() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "serving.md").read_text()
    of_openai = [*NEUTRAL_OF_CHAT, *NEUTRAL_OF_TEXT, *HARMLESS, *responses.NEUTRAL, *responses.HARMLESS]
    names = [*of_openai, *messages.NEUTRAL, *messages.HARMLESS]
    assert [name for name in names if f"`{name}`" not in guide] == []


def test_arguments_that_are_no_json_object_are_refused() -> None:
    for arguments in ("[]", "{", "3", "[" * 100_000, r'{"path": "\ud800"}'):
        calls = [{"function": {"name": "ls", "arguments": arguments}}]
        with pytest.raises(RequestRefused, match="JSON object"):
            read(messages=[{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        assert isinstance(read_request(data), ChatRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.sampled_from([*sorted(GOOD), "seed", "top_p", "tool_choice", "logit_bias"]), json_values)
def test_any_value_in_any_field_is_a_request_or_a_refusal(field: str, value: object) -> None:
    with contextlib.suppress(RequestRefused):
        assert isinstance(read(**{field: value}), ChatRequest)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_text_request_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        assert read_text_request(data).prompt


@settings(max_examples=300)
@given(st.sampled_from(["prompt", "max_tokens", "stop", "seed", "echo", "logprobs"]), json_values)
def test_any_value_in_any_field_of_a_text_request_is_one_or_a_refusal(field: str, value: object) -> None:
    body = {"model": "m", "prompt": "x", field: value}
    with contextlib.suppress(RequestRefused):
        assert read_text_request(json.dumps(body).encode()).prompt


CHAT = laptop_chat()


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, CHAT.vocab_size - 1), max_size=30)
    | st.text(max_size=30).map(lambda t: CHAT.encode(t).tolist()),
    st.booleans(),
    st.lists(st.sampled_from(["a", "e ", "ü", "ab"]), max_size=2),
    st.integers(1, 5),
)
def test_a_stream_contains_the_text_of_the_response_and_no_more(
    ids: list[int], ended: bool, stop: list[str], size: int
) -> None:
    ids = [*ids, CHAT.end_id] if ended else ids
    spoken = StreamedText(CHAT, stop)
    for at in range(0, len(ids), size):
        spoken.add(ids[at : at + size])  # half a character said too early would not begin the whole answer's text
    completion = Completion(
        request_id="r",
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        routes=np.zeros((0, 1, 1), np.uint8),
        routes_start=0,
        spans=(VersionSpan(make_version(0), len(ids)),),
        stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
        engine="e",
    )
    answer = make_answer(
        completion,
        chat=CHAT,
        signatures=standard_tools().signatures,
        stop=stop,
        prompt_ids=np.zeros(1, np.int32),
        sampling=Sampling(max_tokens=64, stop_token_ids=()),
    )
    assert answer.text.startswith(spoken.sent)


class Counting:
    """A chat format that counts decoded tokens."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return CHAT.decode(ids)

    def num_text_tokens(self, ids: list[int], *, begun: bool = False) -> int:
        return CHAT.num_text_tokens(ids, begun=begun)


def test_tokens_that_are_no_characters_are_said_and_not_decoded_again_and_again() -> None:
    half = next(i for i in range(CHAT.vocab_size) if CHAT.decode([i]) == "\ufffd")
    chat = Counting()
    spoken = StreamedText(chat, [])  # type: ignore[arg-type]
    for _ in range(500):
        spoken.add([half])
    assert CHAT.decode([half] * 500).startswith(spoken.sent)
    assert len(spoken.sent) > 480
    assert chat.num_decoded < 500 * 60


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"model":' + b"[" * 200_000, b"\xff", b""])
def test_bodies_that_are_no_valid_json_are_refused(data: bytes) -> None:
    with pytest.raises(RequestRefused):
        read_request(data)
