"""Corpus files, batches of documents, and the tokeniser."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from etude.errors import TaskError
from etude.training import read_corpus, train_tokenizer, write_corpus
from etude.training.batches import group_by_budget, plan_batches, split_documents
from etude.training.corpus import Answered, Documents

SPECIAL = ("<|pad|>", "<|user|>", "<|end|>")


def documents(lengths: list[int]) -> Documents:
    return Documents(tokens=np.arange(sum(lengths), dtype=np.uint16), offsets=np.cumsum([0, *lengths], dtype=np.int64))


def test_a_corpus_comes_back_as_it_was_written(tmp_path: Path) -> None:
    docs = [np.array([1, 2, 3], np.int32), np.array([], np.int32), np.array([65535], np.int32)]
    write_corpus(tmp_path, docs, heldout=[np.array([9], np.int32)])
    corpus = read_corpus(tmp_path, vocab_size=65536)
    assert [corpus.train[i].tolist() for i in range(3)] == [[1, 2, 3], [], [65535]]
    assert corpus.heldout[0].tolist() == [9]
    assert (tmp_path / "tokens.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 255, 255])


def test_pieces_that_are_only_context_are_left_out(tmp_path: Path) -> None:
    answered = Answered(np.arange(10, dtype=np.int32), 6)
    write_corpus(tmp_path, [np.array([7, 8, 9], np.int32), answered])
    docs = read_corpus(tmp_path, vocab_size=65536).train
    assert docs.learned.tolist() == [False, True, True, *[False] * 6, *[True] * 4]
    spans = split_documents(docs, document_tokens=4)
    assert spans.tolist() == [[0, 3], [7, 11], [11, 13]]
    assert docs.num_targets(spans).tolist() == [2, 2, 1]


def test_token_ids_past_sixteen_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="16 bits"):
        write_corpus(tmp_path, [np.array([70_000], np.int32)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.json", b"{"),
        ("corpus.json", b"[]"),
        ("corpus.json", json.dumps({"format": 99}).encode()),
        ("tokens.bin", b"\1"),
        ("documents.bin", b""),
        ("documents.bin", np.array([0, 9], "<i8").tobytes()),
        ("documents.bin", np.array([0, 5, 2, 3], "<i8").tobytes()),
        ("context.bin", b""),
        ("context.bin", np.array([4], "<i8").tobytes()),
    ],
)
def test_damaged_corpora_are_task_errors(tmp_path: Path, name: str, content: bytes) -> None:
    write_corpus(tmp_path, [np.array([1, 2, 3], np.int32)])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match="has no corpus that can be read"):
        read_corpus(tmp_path, vocab_size=10)


def test_an_absent_an_empty_and_a_foreign_corpus_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no corpus"):
        read_corpus(tmp_path / "nowhere", vocab_size=10)
    write_corpus(tmp_path / "empty", [])
    with pytest.raises(TaskError, match="no documents"):
        read_corpus(tmp_path / "empty", vocab_size=10)
    write_corpus(tmp_path / "foreign", [np.array([10], np.int32)])
    with pytest.raises(TaskError, match="token id 10"):
        read_corpus(tmp_path / "foreign", vocab_size=10)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    batch_tokens=st.integers(2, 60),
    document_tokens=st.integers(2, 25),
    seed=st.integers(0, 5),
)
def test_an_epoch_has_every_predictable_token_once_within_budget(
    lengths: list[int], batch_tokens: int, document_tokens: int, seed: int
) -> None:
    docs = documents(lengths)
    cut = split_documents(docs, document_tokens=min(document_tokens, batch_tokens))
    total = int((cut[:, 1] - cut[:, 0]).sum())
    if not total:
        return
    batches = plan_batches(
        docs, num_tokens=total, batch_tokens=batch_tokens, document_tokens=document_tokens, seed=seed
    )
    assert all((b[:, 1] - b[:, 0]).sum() <= batch_tokens for b in batches)
    assert sorted(map(tuple, np.concatenate(batches).tolist())) == sorted(map(tuple, cut.tolist()))


def test_later_epochs_are_shuffled_anew_and_a_plan_repeats() -> None:
    docs = documents([4] * 50)
    first = plan_batches(docs, num_tokens=400, batch_tokens=8, document_tokens=8, seed=3)
    again = plan_batches(docs, num_tokens=400, batch_tokens=8, document_tokens=8, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(np.concatenate(first[:25]), np.concatenate(first[25:]))


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_group_by_budget_covers_all_lengths_in_order(lengths: list[int], budget: int) -> None:
    parts = list(group_by_budget(lengths, budget))
    assert [n for part in parts for n in lengths[part]] == lengths
    assert all(sum(lengths[p]) <= budget or p.stop - p.start == 1 for p in parts)


def test_a_corpus_with_nothing_to_predict_is_named() -> None:
    with pytest.raises(TaskError, match="no token to predict"):
        plan_batches(documents([1, 1]), num_tokens=5, batch_tokens=8, document_tokens=8, seed=0)


def test_any_text_survives_the_tokeniser_and_digits_stay_single(tmp_path: Path) -> None:
    texts = ["def price(n):\n    return n + 12345\n"] * 20
    train_tokenizer(texts, tmp_path, vocab_size=300, special_tokens=SPECIAL, chat_template="{{ messages }}")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.token_to_id(t) for t in SPECIAL] == [0, 1, 2]
    text = "größer 日本 \x00\t 12345<x>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len([t for t in tokenizer.encode("12345").tokens if t.isdigit() and len(t) == 1]) == 5
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 2, "pad_token_id": 0}
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_training_a_tokeniser_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        texts = (f"return {w} + {n}" for n in range(50) for w in ("alpha", "beta", "gamma"))
        train_tokenizer(texts, tmp_path / name, vocab_size=320, special_tokens=SPECIAL, chat_template="")
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="too small"):
        train_tokenizer([], tmp_path, vocab_size=200, special_tokens=SPECIAL, chat_template="")
