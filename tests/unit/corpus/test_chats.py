"""The source `chats`: what the assistant says is marked, in documents and in shards; bad lines are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.corpus import make

from etude.corpus import Corpus, Document, Dropped, build_corpus, check_corpus
from etude.corpus.chats import Chats
from etude.corpus.shards import PhaseTokens, Said
from etude.errors import ConfigError, CorpusError
from etude.file_checksums import file_digest
from etude.harness import ChatFormat, chat_template
from etude.harness.chat import SPECIAL_TOKENS

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def checkpoint(folder: Path) -> Path:
    """A checkpoint folder with etude's chat format over bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    make.tokenizer(folder / "tokenizer.json", [*SPECIAL_TOKENS, make.END])
    (folder / "chat_template.jinja").write_text(chat_template())
    return folder


def chat(number: int, answer: str = "") -> dict[str, Any]:
    """A chat with two answers, the first of which is a tool call."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": number})}}
    return {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "Be brief and exact in everything"},
            {"role": "user", "content": f"add {number} and {number * number}, then say it in words"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": f"the sum is {number + number**2}"},
            {"role": "assistant", "content": [{"type": "text", "text": answer or f"It is {number + number**2}."}]},
            {"role": "user", "content": "thanks, and this has no answer"},
        ],
    }


def write(path: Path, *chats: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in chats)
    if not path.exists() or path.read_text() != text:  # its time would change the sources of a build
        path.write_text(text)
    return path


def built(folder: Path, chats: list[Any], name: str = "out", texts: int = 0, **changes: Any) -> Corpus:
    checkpoint(folder / "checkpoint")
    write(folder / "chats" / "a.jsonl", *chats)
    kind = {"kind": "chats", "files": [str(folder / "chats")], "checkpoint": str(folder / "checkpoint")}
    sources: list[dict[str, Any]] = [{"name": "talk", "kind": kind, "max_epochs": 3.0}]
    if texts:
        make.texts(folder / "texts", texts)
        own = {"kind": "folder", "path": str(folder / "texts")}
        sources.append({"name": "own", "kind": own, "max_epochs": 3.0})
    settings_: dict[str, Any] = {"near": {"threshold": 1.0}, "quality": {"min_alphanumeric": 0.0, "max_repeated": 1.0}}
    settings_["tokenizer"] = {"path": str(folder / "checkpoint")}
    config = make.config(folder, sources=sources, **{**settings_, **changes})
    return build_corpus(config, folder / name)


def said_texts(corpus: Corpus, phase: str = "all") -> list[str]:
    format_ = ChatFormat.load(corpus.folder.parent / "checkpoint")
    tokens = PhaseTokens(corpus, phase)
    return [
        format_.decode(tokens.tokens(start, stop)[tokens.said(start, stop)], special=True)
        for start, stop in tokens.spans_D2.tolist()
    ]


def test_the_marks_are_the_answers_with_their_stop_tokens_and_nothing_else(tmp_path: Path) -> None:
    corpus = built(tmp_path, [chat(3), chat(8)])
    answers = [f"<|call|>add {number}<|end|>It is {total}.<|end|>" for number, total in ((3, 12), (8, 72))]
    assert sorted(said_texts(corpus)) == answers
    (facts,) = corpus.manifest.phases[0].shards
    assert facts.said == "all-00000.said"
    assert facts.said_tokens == len("add 3It is 12.add 8It is 72.") + 6
    assert list(check_corpus(corpus)) == ["all-00000.tokens"]


def test_an_answer_of_weight_0_is_context_that_is_not_learned_with_the_same_tokens(tmp_path: Path) -> None:
    plain, weighted = chat(3), chat(3)
    weighted["messages"][2]["weight"] = 0
    weighted["messages"][4]["weight"] = 1
    corpora = [built(tmp_path / name, [one]) for name, one in (("a", plain), ("b", weighted))]
    assert said_texts(corpora[0]) == ["<|call|>add 3<|end|>It is 12.<|end|>"]
    assert said_texts(corpora[1]) == ["It is 12.<|end|>"]
    tokens = [next(iter(corpus.shards("all"))).document(0).tolist() for corpus in corpora]
    assert tokens[0] == tokens[1]


def test_the_tokens_are_those_that_a_run_would_have_in_its_context(tmp_path: Path) -> None:
    corpus, one = built(tmp_path, [chat(3)]), chat(3)
    format_ = ChatFormat.load(tmp_path / "checkpoint")
    messages = [{**m, "content": m["content"] or ""} for m in one["messages"][:4]]
    prompt = format_.encode_prompt(messages[:2], format_.signatures([TOOL]))
    after = format_.continuation(messages[:3], messages[3:4], format_.signatures([TOOL]))
    (shard,) = corpus.shards("all")
    ids, said = shard.document(0), corpus.said(corpus.manifest.phases[0].shards[0])[:]
    first, second = np.flatnonzero(np.diff(said.astype(int), prepend=0) == 1)
    assert ids[:first].tolist() == prompt.tolist()
    end = first + len("add 3") + 2
    assert ids[end:second].tolist() == after.tolist()


def test_text_that_spells_a_special_token_is_no_token_and_no_end_of_an_answer(tmp_path: Path) -> None:
    corpus = built(tmp_path, [chat(3, "I write <|end|> and <|user|> as text")])
    end = ChatFormat.load(tmp_path / "checkpoint").end_id
    (shard,) = corpus.shards("all")
    said = corpus.said(corpus.manifest.phases[0].shards[0])[:]
    assert said_texts(corpus) == ["<|call|>add 3<|end|>I write <|end|> and <|user|> as text<|end|>"]
    assert (shard.document(0)[said] == end).sum() == 2


def test_texts_and_chats_share_a_phase_in_their_shares_and_texts_have_no_marks(tmp_path: Path) -> None:
    phases = [{"name": "sft", "tokens": 6000, "mix": {"talk": 1, "own": 2}}]
    chats = [chat(i) for i in range(12)]
    corpus = built(tmp_path, chats, texts=8, phases=phases, shard_tokens=900, fim={"rate": 0.0})
    drawn = corpus.phase("sft").sources
    assert drawn["own"].tokens == pytest.approx(2 * drawn["talk"].tokens, rel=0.35)
    sources = [one["source"] for shard in corpus.phase("sft").shards for one in corpus.provenance(shard)]
    assert len(corpus.phase("sft").shards) > 2
    for source, text in zip(sources, said_texts(corpus, "sft"), strict=True):
        assert bool(text) == (source == "talk")
        assert not text or text.startswith("<|call|>add")
    other = built(tmp_path, chats, name="again", texts=8, phases=phases, shard_tokens=900, fim={"rate": 0.0})
    names = {path.name for path in corpus.folder.iterdir()}
    assert {path.name for path in other.folder.iterdir()} == names
    for name in names:
        assert (corpus.folder / name).read_bytes() == (other.folder / name).read_bytes()


def test_a_build_that_was_stopped_before_its_marks_were_written_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etude.corpus.work import Work

    chats = [chat(i) for i in range(6)]
    whole = built(tmp_path, chats, name="whole", shard_tokens=150)
    count, real = [0], Work._said

    def stops(self: Work, documents: list[tuple[int, int, int]]) -> np.ndarray:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        return real(self, documents)

    monkeypatch.setattr(Work, "_said", stops)
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path, chats, name="again", shard_tokens=150)
    again = built(tmp_path, chats, name="again", shard_tokens=150)
    assert len(whole.manifest.phases[0].shards) > 2
    for path in whole.folder.iterdir():
        assert path.read_bytes() == (again.folder / path.name).read_bytes()


@settings(max_examples=20, deadline=None)
@given(place=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.integers(0, 9))
def test_changed_marks_are_refused(tmp_path_factory: pytest.TempPathFactory, place: int, bits: int, cut: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed-marks"
    corpus = Corpus.open(folder / "out") if folder.is_dir() else built(folder, [chat(3), chat(8)])
    path = corpus.folder / "all-00000.said"
    whole = path.read_bytes()
    data = bytearray(whole)
    data[place % len(data)] ^= bits
    path.write_bytes(bytes(data[: len(data) - cut]))
    try:
        with pytest.raises(CorpusError, match="damaged"):
            list(check_corpus(corpus))
    finally:
        path.write_bytes(whole)


def test_missing_or_shortened_marks_are_refused_when_a_phase_is_opened(tmp_path: Path) -> None:
    corpus = built(tmp_path, [chat(3)])
    path = corpus.folder / "all-00000.said"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorpusError, match="is damaged: it has"):
        PhaseTokens(corpus, "all")
    path.unlink()
    with pytest.raises(CorpusError, match="cannot be read"):
        PhaseTokens(corpus, "all")


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(0, 70), st.integers(0, 70))
def test_any_part_of_the_marks_is_that_part_of_the_bits(marks: list[bool], start: int, stop: int) -> None:
    said = Said(np.packbits(marks, bitorder="little"), len(marks))
    start, stop = sorted((min(start, len(marks)), min(stop, len(marks))))
    assert said[start:stop].tolist() == marks[start:stop]


BAD = [
    (b"\xff\xfe{}", "not-utf-8"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not-utf-8"),
    (b"{", "not-json"),
    (b" ", "empty"),
    (None, "too-large"),
    (b"[1]", "no-messages"),
    (b'{"messages": {}}', "no-messages"),
    (b'{"messages": [3]}', "bad-message"),
    (b'{"messages": [{"role": "root", "content": "x"}]}', "unknown-role"),
    (b'{"messages": [{"role": ["user"], "content": "x"}]}', "unknown-role"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "no-answer"),
    (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}', "no-answer"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "not-text"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "bad-message"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}', "bad-weight"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": true}]}', "bad-weight"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', "no-answer"),
    (b'{"tools": [3], "messages": [{"role": "user", "content": "x"}]}', "bad-tools"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}', "chat-template"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_line_that_is_no_chat_is_named_with_its_reason(tmp_path: Path, line: bytes | None, reason: str) -> None:
    source = Chats((str(tmp_path),), checkpoint(tmp_path / "checkpoint"))
    assert source.parsed("a.jsonl:7", line) == Dropped("a.jsonl:7", reason)


MESSAGE_KEYS = ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "parameters"]
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "assistant", "tool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MESSAGE_KEYS), inner, max_size=5),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=60)
    | st.fixed_dictionaries({"messages": JSON | st.lists(JSON, max_size=4), "tools": JSON}).map(
        lambda row: json.dumps(row).encode()
    )
)
def test_any_line_is_a_chat_or_a_named_drop(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-line"
    if not folder.is_dir():
        checkpoint(folder)
    found = Chats((), folder).parsed("x", line)
    assert isinstance(found, Document | Dropped)
    assert isinstance(found, Dropped) or found.said


def test_bad_lines_are_counted_by_reason_beside_the_good_ones(tmp_path: Path) -> None:
    corpus = built(tmp_path, [chat(3), {"messages": []}, {"messages": [{"role": "x"}]}])
    talk = corpus.manifest.sources["talk"]
    assert (talk.documents, talk.kept, talk.dropped) == (3, 1, {"no-messages": 1, "unknown-role": 1})
    assert talk.examples["no-messages"][0].startswith("a.jsonl:")


def test_a_checkpoint_with_another_tokenizer_than_the_corpus_is_refused(tmp_path: Path) -> None:
    built(tmp_path, [chat(3)])
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "checkpoint", other)
    make.tokenizer(other / "tokenizer.json", [*SPECIAL_TOKENS, make.END, "<|more|>"])
    with pytest.raises(ConfigError, match="another tokenizer than the corpus"):
        built(tmp_path, [chat(3)], name="new", tokenizer={"path": str(other)})


def test_a_checkpoint_that_does_not_exist_is_named(tmp_path: Path) -> None:
    built(tmp_path, [chat(3)])
    digest = file_digest(tmp_path / "checkpoint" / "tokenizer.json")
    (tmp_path / "empty").mkdir()
    for name, says in (("nope", "there is no folder"), ("empty", "there is no file")):
        with pytest.raises(ConfigError, match="the checkpoint of the chats has no tokenizer") as error:
            Chats(("chats.jsonl",), tmp_path / name).check_tokenizer(digest)
        assert says in error.value.facts
        assert "tokenizer.path" not in error.value.hint


DROPS_REASONING = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def published(folder: Path, template: str) -> Path:
    """A checkpoint with a chat format of its own."""
    folder.mkdir(parents=True)
    make.tokenizer(folder / "tokenizer.json", ["<|im_start|>", "<|im_end|>", make.END])
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


def test_each_answer_of_a_template_that_drops_past_reasoning_is_whole(tmp_path: Path) -> None:
    folder = published(tmp_path / "checkpoint", DROPS_REASONING)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "easy"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2", "reasoning_content": "harder"},
    ]
    found = Chats((), folder).parsed("x", json.dumps({"messages": messages}).encode())
    assert isinstance(found, Document)
    answers = [found.text[start:stop] for start, stop in found.said]
    assert answers == ["<think>easy</think>\n1<|im_end|>", "<think>harder</think>\n2<|im_end|>"]
    between = found.text[found.said[0][1] : found.said[1][0]]
    assert between == "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_whose_answers_do_not_begin_with_its_prompt_is_named(tmp_path: Path) -> None:
    template = DROPS_REASONING.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
    )
    folder = published(tmp_path / "checkpoint", template)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
    line = json.dumps({"messages": messages}).encode()
    assert Chats((), folder).parsed("x", line) == Dropped("x", "chat-template")


def test_a_chat_with_a_secret_is_dropped_even_where_texts_are_redacted(tmp_path: Path) -> None:
    secret = "the key is AKIA" + "Q7RZ2LX5M8N4P6T3"
    corpus = built(tmp_path, [chat(3), chat(5, secret)], secrets="redact")
    assert corpus.manifest.sources["talk"].dropped == {"secret": 1}
    assert len(said_texts(corpus)) == 1
