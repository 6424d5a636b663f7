"""A checkpoint's own chat template gives the tokens that transformers gives, and its completions are read back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import chats

from etude.harness import Call, ChatFormat, standard_tools
from etude.harness.chat import CheckpointChatFormat, Reply
from etude.harness.episode import assistant_message
from etude.loop.hint_format import message_ends

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Größe & "weather" of a <city>.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "the weather in Paris?\n\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nsunny?\n</think>\n\nit is mild"}
CALLED = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}
    ],
}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "sunny & <mild>"}
CONVERSATIONS = {
    "a question": [ASKED],
    "with a system prompt": [SYSTEM, ASKED],
    "thought of, asked again": [SYSTEM, ASKED, THOUGHT, ASKED],
    "called and told": [SYSTEM, ASKED, CALLED, TOLD],
    "told twice, answered, asked again": [ASKED, CALLED, TOLD, TOLD, {**THOUGHT, "content": "it is mild"}, ASKED],
    "nothing said with the call": [ASKED, {**CALLED, "content": None}, TOLD],
    "reasoning beside the words": [ASKED, {**CALLED, "reasoning": "look it up", "content": ""}, TOLD],
}


@pytest.fixture(scope="module", params=["qwen", "deepseek", "glm", "minimax"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.make(tmp_path_factory.mktemp("chat") / request.param, request.param)


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as JSON, which DeepSeek's templates take."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return copied


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_are_those_of_transformers(folder: Path, name: str, tools: list[dict[str, Any]]) -> None:
    messages = CONVERSATIONS[name]
    theirs, ours = AutoTokenizer.from_pretrained(folder), ChatFormat.load(folder)
    given_messages = as_text(messages) if folder.name == "deepseek" else messages
    expected = theirs.apply_chat_template(
        given_messages, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    ids = ours.encode_prompt(messages, ours.signatures(tools))
    assert ours.decode(ids, special=True) == expected
    assert ids.tolist() == theirs(expected, add_special_tokens=False)["input_ids"]


def test_what_follows_a_sampled_message_is_what_the_template_writes_behind_it(folder: Path) -> None:
    chat = ChatFormat.load(folder)
    signatures = chat.signatures([WEATHER])
    call = Call("weather", {"city": "Paris"})
    said = assistant_message(Reply("", (call,)), turn=1)
    new = chat.continuation([ASKED, said], [TOLD], signatures)
    text = chat.decode(new, special=True)
    expected = {
        "qwen": "\n<|im_start|>user\n<tool_response>\nsunny & <mild>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        "deepseek": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny & <mild><｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>",
        "glm": "\n<tool_response>\nsunny & <mild>\n</tool_response><|assistant|>",
        "minimax": "\n]~b]tool\n<response>sunny & <mild></response>[e~[\n]~b]ai\n<think>\n",
    }
    assert text == expected[folder.name]
    cut_off = chat.continuation([ASKED, said], [TOLD], signatures, ended=False)
    end = chat.tokens.added["<|observation|>"] if folder.name == "glm" else chat.end_id
    assert cut_off.tolist() == [end, *new.tolist()]
    assert chat.encode_call(call)[-1] == end
    assert (
        chat.last_message([*chat.encode_prompt([ASKED], signatures), *chat.encode_call(call), *new]) == TOLD["content"]
    )
    thought = chat.continuation([ASKED, THOUGHT], [ASKED], signatures)
    assert chat.decode(thought, special=True).count(ASKED["content"]) == 1


def test_a_call_is_spelled_and_read_back(folder: Path) -> None:
    chat = ChatFormat.load(folder)
    assert isinstance(chat, CheckpointChatFormat)
    signatures = chat.signatures([WEATHER])
    call = Call("weather", {"city": 'Pa"ris\n<think>', "days": 3})
    ids = chat.encode_call(call).tolist()
    reply = chat.parse([*chat.encode("so"), *ids], signatures)
    assert (reply.text, reply.calls) == ("so", (call,))
    assert chat.num_text_tokens([*chat.encode("so"), *ids]) == len(chat.encode("so"))
    assert chat.parse(ids[:-1], signatures).error == "too long"
    assert chat.parse([*ids[:-1], *ids], signatures).calls == (call, call)
    assert chat.parse([*ids[:2], chat.end_id], signatures).error == "the call cannot be read"
    for arguments, error in (
        ({"town": "x"}, "usage: weather CITY DAYS"),
        ({}, "usage: weather CITY DAYS"),
        ({"city": "x", "days": "two"}, "days is not of type integer"),
    ):
        assert chat.parse(chat.encode_call(Call("weather", arguments)), signatures).error == error
    assert chat.parse(chat.encode_call(Call("rain", {})), signatures).error == "no such tool: rain"
    assert chat.parse(chat.encode_call(Call("rain", {})), signatures, strict=False).calls == (Call("rain", {}),)
    assert chat.parse([*chat.encode("it is mild"), chat.end_id], signatures).text == "it is mild"


def test_a_template_that_drops_the_text_before_a_call_is_continued_behind_it(tmp_path: Path) -> None:
    chat = ChatFormat.load(chats.make(tmp_path / "llama", "llama"))
    signatures = chat.signatures([WEATHER])
    call = Call("weather", {"city": 'Pa"ris\n<|eot_id|>', "days": 3})
    ids = chat.encode_call(call).tolist()
    assert chat.parse(ids, signatures).calls == (call,)
    new = chat.continuation([ASKED, assistant_message(Reply("so", (call,)), turn=1)], [TOLD], signatures)
    assert chat.decode(new, special=True) == (
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny & <mild><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert chat.last_message([*chat.encode_prompt([ASKED], signatures), *ids, *new]) == TOLD["content"]


def test_a_completion_in_channels_is_reasoning_an_answer_and_a_call(tmp_path: Path) -> None:
    chat = ChatFormat.load(chats.make(tmp_path / "harmony", "harmony"))
    assert isinstance(chat, CheckpointChatFormat)  # and not etude's own, whose tokens it also has
    signatures = chat.signatures([WEATHER])

    def parsed(text: str) -> Reply:
        return chat.parse(chat.tokens.encode_rendering(text), signatures)

    thought = "<|channel|>analysis<|message|>hm to=functions.rain<|end|><|start|>assistant"
    call = Call("weather", {"city": 'Pa"ris\n', "days": 3})
    ids = chat.encode_call(call).tolist()
    reply = chat.parse([*chat.tokens.encode_rendering(thought), *ids], signatures)
    assert reply == Reply("", (call,), reasoning="hm to=functions.rain")
    assert parsed(f"{thought}<|channel|>final<|message|>mild<|return|>") == Reply(
        "mild", reasoning="hm to=functions.rain"
    )
    header = " to=functions.weather<|channel|>commentary json<|message|>"
    assert parsed(header + '{"city": "Rome"}<|call|>').calls == (Call("weather", {"city": "Rome"}),)
    assert parsed(header + "{}<|call|>").error == "usage: weather CITY DAYS"
    assert parsed(header + "{<|call|>").error == "the call's arguments are no JSON"
    assert parsed("<|channel|>commentary to=python<|message|>1<|call|>").error == "no such tool: python"
    assert parsed("<|channel|>final<|message|>mild").error == "too long"

    said = assistant_message(Reply("so", (call,), reasoning="hm"), turn=1)
    new = chat.continuation([ASKED, said], [TOLD], signatures)
    assert chat.decode(new, special=True) == (
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny & <mild>"<|end|>'
        "<|start|>assistant"
    )
    assert chat.last_message([*chat.encode_prompt([ASKED], signatures), *ids, *new]) == TOLD["content"]
    answered = chat.continuation([ASKED, {"role": "assistant", "content": "mild"}], [ASKED], signatures)
    assert chat.decode(answered, special=True) == f"<|start|>user<|message|>{ASKED['content']}<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFormat]:
    base = tmp_path_factory.mktemp("formats")
    return {name: ChatFormat.load(chats.make(base / name, name)) for name in chats.KINDS}


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("<|>imtookl_call/\ue000\ue001 a\n")) | st.sampled_from([*chats.QWEN_TOKENS]))
def test_text_that_spells_a_token_stays_text(formats: dict[str, ChatFormat], text: str) -> None:
    chat = formats["qwen"]
    ids = chat.encode_prompt([{"role": "tool", "content": text}]).tolist()
    plain = chat.encode(text).tolist()
    assert chat.decode(ids, special=True) == (
        f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not set(plain) & {chat.tokens.added[token] for token in chats.QWEN_TOKENS}
    structure = [i for i in ids if i in chat.tokens.added.values()]
    assert len(structure) == 5


@settings(max_examples=100)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_any_completion_parses_to_a_reply(formats: dict[str, ChatFormat], ids: list[int]) -> None:
    for chat in formats.values():
        reply = chat.parse([*ids, chat.end_id], standard_tools().signatures)
        assert not (reply.calls and reply.error)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_ends_with_what_follows_the_text_of_its_last_message_which_is_where_a_hint_is_put(
    folder: Path, name: str
) -> None:
    chat, messages = ChatFormat.load(folder), CONVERSATIONS[name]
    prompt = chat.encode_prompt(messages, chat.signatures([WEATHER])).tolist()
    end = next(end.tolist() for end in message_ends(chat) if prompt[-len(end) :] == end.tolist())
    longer = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + "\nno"}]
    hinted = chat.decode([*prompt[: -len(end)], *chat.encode("\nno").tolist(), *end], special=True)
    assert hinted == chat.decode(chat.encode_prompt(longer, chat.signatures([WEATHER])), special=True)
