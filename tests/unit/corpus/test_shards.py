"""Shards and manifests: damaged or foreign bytes are errors, never other tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.corpus import make

from etude.corpus import Corpus, Manifest, Shard, build_corpus, check_corpus
from etude.corpus.shards import HEADER, parse_header, parse_manifest
from etude.errors import CorpusError, InputError
from etude.file_checksums import sealed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    make.texts(folder / "texts", 2)
    return build_corpus(make.config(folder), folder / "out")


def test_tokens_of_a_large_vocabulary_are_32_bits(corpus):
    (shard,) = corpus.shards("all")
    assert shard.tokens_T.dtype == np.uint32
    assert isinstance(shard.tokens_T, np.memmap)
    assert not shard.tokens_T.flags.writeable
    assert len(shard) == 2
    assert shard.document(0)[-1] == corpus.manifest.tokenizer.end_id


def changed(data: bytes, place: int, bits: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


@settings(max_examples=25)
@given(place=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.integers(0, 300))
def test_a_changed_or_shortened_shard_is_an_error(corpus, place, bits, cut):
    path = next(corpus.folder.glob("*.tokens"))
    whole = path.read_bytes()
    try:
        path.write_bytes(changed(whole, place, bits)[: len(whole) - cut])
        with pytest.raises(CorpusError):
            list(check_corpus(corpus))
        try:
            shard = Shard.open(path, vocab_size=260)
        except CorpusError:
            return
        assert sum(len(shard.document(i)) for i in range(len(shard))) == len(shard.tokens_T)
    finally:
        path.write_bytes(whole)


@given(st.binary(max_size=40))
def test_any_header_is_counts_or_an_error(data):
    try:
        documents, tokens = parse_header(data, vocab_size=260)
    except ValueError:
        return
    assert HEADER.unpack(data[: HEADER.size])[3:] == (documents, tokens)


@settings(max_examples=25)
@given(place=st.integers(0, 10**6), bits=st.integers(1, 255))
def test_a_changed_manifest_is_an_error_or_says_the_same(corpus, place, bits):
    whole = (corpus.folder / "manifest.json").read_bytes()
    try:
        found = parse_manifest(changed(whole, place, bits))
    except CorpusError:
        return
    assert found == corpus.manifest  # a space became another one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.binary(max_size=50)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(Manifest.__struct_fields__), JSON).map(
        lambda one: json.dumps(sealed({**one, "format": "etude-corpus", "version": 1})).encode()
    )
)
def test_any_bytes_are_a_manifest_or_an_error(data):
    with pytest.raises(CorpusError, match=r"not a valid manifest|is damaged"):
        parse_manifest(data)


def test_a_manifest_names_files_of_its_folder_only(corpus):
    plain = json.loads((corpus.folder / "manifest.json").read_bytes())
    for name in ("../secret", "/etc/passwd", ".hidden", ""):
        plain["phases"][0]["shards"][0]["file"] = name
        with pytest.raises(CorpusError, match="not a file of its folder"):
            parse_manifest(json.dumps(sealed(plain)).encode())


def test_a_folder_without_a_corpus_is_an_error(tmp_path: Path):
    with pytest.raises(InputError, match="no corpus in"):
        Corpus.open(tmp_path)
    with pytest.raises(InputError, match="there is no such folder") as error:
        Corpus.open(tmp_path / "nope")
    assert "continues" not in error.value.hint
    with pytest.raises(InputError, match="no phase 'al'"):
        list(Corpus(tmp_path, parse_manifest(_manifest())).shards("al"))


def _manifest() -> bytes:
    empty = {"sources": {}, "phases": [], "config": {}, "format": "etude-corpus", "version": 1}
    tokenizer = {"path": "t", "sha256": "0", "vocab_size": 1, "end": "e", "end_id": 0}
    return json.dumps(
        sealed({**empty, "tokenizer": tokenizer, "heldout": {"texts": 0, "too_short": [], "sha256": ""}})
    ).encode()
