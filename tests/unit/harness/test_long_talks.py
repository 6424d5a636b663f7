"""A long conversation is continued without rendering its history, and gets the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.parity import chats
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer

from etude.harness import ChatFormat, chat_template, standard_tools

TOOLS = standard_tools().to_openai()
CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": {}}}


def turns(n: int) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """(messages up to a reply, new messages) of the turns of one conversation, with calls and without."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fix it"}]
    found = []
    for i in range(n):
        reply: dict[str, Any] = {"role": "assistant", "content": f"so {i}"}
        new: list[dict[str, Any]] = [{"role": "user", "content": f"go on {i}"}]
        if i % 3:
            reply["tool_calls"] = [CALL] * (i % 3)
            new = [{"role": "tool", "content": f"file{i}", "tool_call_id": "1"}] * (i % 3)
        talk.append(reply)
        found.append((list(talk), new))
        talk += new
    return found


@pytest.mark.parametrize("name", ["etude", "qwen", "deepseek"])
def test_the_tokens_are_those_of_the_whole_history(name: str, tmp_path: Path) -> None:
    chat = laptop_chat() if name == "etude" else ChatFormat.load(chats.make(tmp_path, name))
    signatures = chat.signatures(TOOLS)
    rendered: list[int] = []
    after_reply = chat._after_reply
    chat._after_reply = lambda previous, *rest: (rendered.append(len(previous)), after_reply(previous, *rest))[1]  # type: ignore[method-assign]
    try:
        for at, (before, new) in enumerate(turns(40)):
            ended = bool(at % 2)
            whole = after_reply(before, new, signatures, ended)
            rendered.clear()
            assert chat.continuation(before, new, signatures, ended=ended).tolist() == (
                chat.tokens.encode_rendering(whole).tolist()
            )
            assert at != 38 or max(rendered) <= 3
    finally:
        del chat._after_reply  # type: ignore[method-assign]


def test_kinds_of_messages_that_are_known_stay_cheap_when_too_many_others_come() -> None:
    chat = ChatFormat(laptop_tokenizer(), chat_template())
    rendered: list[int] = []
    after_reply = chat._after_reply
    chat._after_reply = lambda previous, *rest: (rendered.append(len(previous)), after_reply(previous, *rest))[1]  # type: ignore[method-assign]
    history, new = turns(8)[-1]

    def rendered_for(messages: list[dict[str, Any]]) -> list[int]:
        rendered.clear()
        whole = chat.tokens.encode_rendering(after_reply(history, messages, {}, True))
        assert chat.continuation(history, messages, {}).tolist() == whole.tolist()
        return list(rendered)

    def kind(number: int) -> list[dict[str, Any]]:
        """Nine messages whose roles alternate; the bits of `number` say which of them have reasoning."""
        both = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        return [both[i % 2] | ({"reasoning_content": ""} if number >> i & 1 else {}) for i in range(9)]

    assert [rendered_for(new) for _ in range(3)] == [[len(history), 3], [len(history), 3], [3]]
    for number in range(300):
        rendered_for(kind(number))
    assert [rendered_for(kind(299)) for _ in range(3)] == [[len(history)]] * 3
    assert [rendered_for(new) for _ in range(3)] == [[len(history), 3], [3], [3]]
    assert len(chat._num_continued) == 256


def test_a_template_that_counts_its_messages_is_rendered_whole() -> None:
    counting = chat_template() + "{% if add_generation_prompt %}{{ messages | length }}{% endif %}"
    chat = ChatFormat(laptop_tokenizer(), counting)
    for before, new in turns(40):
        said = chat.decode(chat.continuation(before, new, {}))
        assert said.endswith(str(len(before) + len(new)))


def test_tools_that_differ_only_within_their_parameters_are_rendered_as_they_are(tmp_path: Path) -> None:
    chat = ChatFormat.load(chats.make(tmp_path, "qwen"))
    prompts = []
    for inner in ("one", "two", "one"):  # the dict of the one before may have the same id
        schema = {"type": "object", "properties": {"x": {"type": "object", "description": inner}}}
        signatures = chat.signatures([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        prompts.append(chat.decode(chat.encode_prompt([{"role": "user", "content": "hi"}], signatures)))
        del signatures
    assert prompts[0] == prompts[2] != prompts[1]
    assert '"two"' in prompts[1]


class Counted:
    """A tokeniser that counts the characters that it tokenises."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_chars = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_instructions_and_tools_are_tokenised_once_for_all_conversations(tmp_path: Path) -> None:
    folder = chats.make(tmp_path, "qwen")
    chat = ChatFormat.load(folder)
    counted: Any = Counted(chat.tokens.tokenizer)
    chat.tokens.tokenizer = counted
    signatures = chat.signatures(TOOLS)
    system = {"role": "system", "content": "be brief <|im_end|> <think> \ue000 " * 40}
    for i in range(5):
        talk = [system, {"role": "user", "content": f"{i}: " + "fix it " * 100}]
        before = counted.num_chars
        ids = chat.encode_prompt(talk, signatures)
        new = counted.num_chars - before
        assert new > 2500 if i == 0 else 700 < new < 800
        assert ids.tolist() == ChatFormat.load(folder).encode_prompt(talk, signatures).tolist()
