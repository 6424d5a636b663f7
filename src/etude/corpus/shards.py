"""The shards of a corpus on disk: token ids in memory-mapped files, and a manifest (docs/formats/corpus.md).

A shard is read without copying: a header of 32 bytes, the starts of the documents, and the token ids."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from etude import progress
from etude.corpus.hashes import U64
from etude.errors import CorpusError, InputError
from etude.file_checksums import file_digest, sealed, verify_json

FORMAT = "etude-corpus"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
HEADER = struct.Struct("<8sIIQQ")
MAGIC = b"ETUDETOK"

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
_REMAKE = "restore the folder from a backup, or delete it and build it again"


class ShardFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One shard in a manifest. `file`, `provenance` and `said` are file names; the digests are SHA-256 in hex.

    `said` is a file with a bit for each token, which is 1 in answers of the assistant; "" for a shard without chats."""

    file: str
    provenance: str
    documents: int
    tokens: int
    sha256: str
    provenance_sha256: str
    said: str = ""
    said_tokens: int = 0
    said_sha256: str = ""

    @property
    def names(self) -> dict[str, str]:
        """The SHA-256 of each file of the shard, by name."""
        found = {self.file: self.sha256, self.provenance: self.provenance_sha256}
        return {**found, self.said: self.said_sha256} if self.said or self.said_sha256 else found


class DrawnFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one source a phase uses. `epochs`: how many epochs of the source were used in all phases up to this
    one."""

    documents: int
    tokens: int
    epochs: float


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One phase in a manifest. `missing_tokens`: how many tokens fewer it has than configured, because all its sources
    reached `max_epochs`."""

    name: str
    documents: int
    tokens: int
    missing_tokens: int
    sources: dict[str, DrawnFacts]
    shards: tuple[ShardFacts, ...]


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the documents of one source. `bytes`: the size of the kept texts in UTF-8.

    `dropped`, `redacted`: the number of documents for each reason, or each kind of secret.

    `examples`: for each reason, the ids of the first documents that were dropped for it; for a duplicate or a held-out
    text also the id or name of the text that it repeats."""

    documents: int
    kept: int
    bytes: int
    tokens: int
    licences: dict[str, int]
    dropped: dict[str, int]
    redacted: dict[str, int]
    examples: dict[str, list[str]]


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer of a corpus. `path`: as in the config. `end`: name of the token after each document."""

    path: str
    sha256: str
    vocab_size: int
    end: str
    end_id: int


class HeldOutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out texts of a corpus: their number, and the names of those that are too short to be searched for."""

    texts: int
    too_short: tuple[str, ...]
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a corpus. `config`: all settings with which it was built."""

    format: str
    version: int
    tokenizer: TokenizerFacts
    heldout: HeldOutFacts
    sources: dict[str, SourceFacts]
    phases: tuple[PhaseFacts, ...]
    config: dict[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a corpus atomically. It is written last: without it the corpus is incomplete."""
    text = json.dumps(sealed(msgspec.to_builtins(manifest)), indent=1) + "\n"
    write_atomically(folder / MANIFEST, text.encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, and rename it."""
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def parse_manifest(data: bytes, name: object = MANIFEST) -> Manifest:
    """Parse and verify the bytes of a manifest. Raises `CorpusError` for anything that `write_manifest` did not write.

    `name` is the file's name in that error."""
    try:
        plain = json.loads(data)
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise ValueError("it is not the manifest of a corpus")
        if plain.get("version") != VERSION:
            raise ValueError(f"it has version {plain.get('version')!r}, and this version of etude supports {VERSION}")
        verify_json(plain, name, must=True, kind=CorpusError)
        manifest = msgspec.convert({key: value for key, value in plain.items() if key != "sha256"}, Manifest)
        files = [file for phase in manifest.phases for shard in phase.shards for file in shard.names]
        if any("/" in file or file.startswith(".") or "\0" in file or not file for file in files):
            raise ValueError("a shard is not a file of its folder")
        return manifest
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CorpusError(f"{name} is not a valid manifest", str(error)[:300], hint=_REMAKE) from None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus. Raises `InputError` if the folder has none, and `CorpusError` if it is damaged."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorpusError(f"{path} is not a valid manifest", "it is too large", hint=_REMAKE)
        return parse_manifest(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "work").is_dir():
            facts, hint = (
                "its build has not ended",
                "run the same `etude corpus build` again: it continues where it stopped",
            )
        else:
            facts = "it has no manifest.json" if folder.is_dir() else "there is no such folder"
            hint = "give the folder in which `etude corpus build` wrote a corpus"
        raise InputError(f"no corpus in {folder}", facts, hint=hint) from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read", str(error.strerror), hint="check the disk and its mount") from None


@dataclass(frozen=True)
class Shard:
    """One shard, memory-mapped. `tokens_T`: uint32 token ids. `starts_D`: int64, the position of each document's first
    token; the last element is T."""

    tokens_T: U32
    starts_D: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts_D) - 1

    def document(self, index: int) -> U32:
        """Return the token ids of a document, with its end token, as a view into the file: [T] uint32."""
        return self.tokens_T[self.starts_D[index] : self.starts_D[index + 1]]

    @classmethod
    def open(cls, path: Path, *, vocab_size: int) -> Shard:
        """Map a shard into memory, and check its header and the starts of its documents, but not its tokens.

        Raises `CorpusError` for a file that is damaged, cut off, or of another vocabulary."""
        try:
            with path.open("rb") as file:
                num_documents, num_tokens = parse_header(file.read(HEADER.size), vocab_size=vocab_size)
                size = os.fstat(file.fileno()).st_size
            expected = HEADER.size + 8 * (num_documents + 1) + 4 * num_tokens
            if size != expected:
                raise ValueError(f"it has {size:,} bytes, and its header says {expected:,}")
            starts = np.memmap(path, "<i8", "r", HEADER.size, (num_documents + 1,))
            if num_tokens:
                tokens = np.memmap(path, "<u4", "r", HEADER.size + 8 * (num_documents + 1), (num_tokens,))
            else:
                tokens = np.zeros(0, np.uint32)  # type: ignore[assignment]  # an empty file range cannot be mapped
        except ValueError as error:
            raise CorpusError(f"{path} is not a valid shard", str(error), hint=_REMAKE) from None
        except OSError as error:
            raise CorpusError(f"{path} cannot be read", str(error.strerror), hint=_REMAKE) from None
        if starts[0] != 0 or starts[-1] != num_tokens or (np.diff(starts) < 0).any():
            raise CorpusError(f"{path} is not a valid shard", "the starts of its documents do not ascend", hint=_REMAKE)
        return cls(tokens, starts)


def parse_header(data: bytes, *, vocab_size: int) -> tuple[int, int]:
    """Return the numbers of documents and tokens of a shard from its first 32 bytes. Raises `ValueError`."""
    if len(data) < HEADER.size:
        raise ValueError("it is shorter than a header")
    magic, version, vocabulary, num_documents, num_tokens = HEADER.unpack(data[: HEADER.size])
    if magic != MAGIC:
        raise ValueError("it does not begin with ETUDETOK")
    if version != VERSION:
        raise ValueError(f"it has version {version}, and this version of etude supports {VERSION}")
    if vocabulary != vocab_size:
        raise ValueError(f"its vocabulary has {vocabulary:,} tokens, and that of the corpus {vocab_size:,}")
    if num_documents >= 1 << 48 or num_tokens >= 1 << 48:
        raise ValueError("its header has impossible counts")
    return num_documents, num_tokens


@dataclass(frozen=True)
class Said:
    """Which tokens of a shard belong to answers of an assistant, memory-mapped. `bits`: uint8, one bit for each token;
    None: none of them does."""

    bits: npt.NDArray[np.uint8] | None
    num_tokens: int

    def __getitem__(self, part: slice) -> npt.NDArray[np.bool_]:
        start, stop, _ = part.indices(self.num_tokens)
        if self.bits is None:
            return np.zeros(stop - start, np.bool_)
        first = start // 8
        found = np.unpackbits(self.bits[first : -(-stop // 8)], bitorder="little")
        return found[start - 8 * first : stop - 8 * first].astype(np.bool_)

    @classmethod
    def open(cls, path: Path | None, *, num_tokens: int) -> Said:
        """Map the file that marks the tokens of answers into memory; None: no token is marked.

        Raises `CorpusError` if its size does not fit `num_tokens`."""
        if path is None:
            return cls(None, num_tokens)
        try:
            size = path.stat().st_size
            if size != -(-num_tokens // 8):
                what = f"it has {size:,} bytes, and its shard has {num_tokens:,} tokens"
                raise CorpusError(f"{path} is damaged", what, hint=_REMAKE)
            return cls(np.memmap(path, np.uint8, "r") if size else None, num_tokens)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read", str(error.strerror), hint=_REMAKE) from None


@dataclass(frozen=True)
class Corpus:
    """A corpus that was built: the folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Corpus:
        """Open a corpus. Raises `InputError` if there is none, and `CorpusError` if its manifest is damaged."""
        return cls(Path(folder), read_manifest(Path(folder)))

    def check_tokenizer(self, sha256: str, name: object) -> None:
        """Raise `CorpusError` if the corpus was built with another tokenizer.

        `sha256`: the SHA-256 of tokenizer.json. `name`: the tokenizer's name in the error."""
        own = self.manifest.tokenizer
        if sha256 != own.sha256:
            facts = f"its SHA-256 is {sha256[:12]}, that of the corpus {own.sha256[:12]} ({own.path})"
            hint = "use the tokenizer of the corpus, or build the corpus again with this one"
            raise CorpusError(f"{name} is not the tokenizer of {self.folder}", facts, hint=hint)

    def phase(self, name: str) -> PhaseFacts:
        """Return what the manifest says about a phase. Raises `InputError` for an unknown one."""
        known = {one.name: one for one in self.manifest.phases}
        if name not in known:
            raise InputError(f"the corpus has no phase {name!r}", hint=f"choose one of its phases: {', '.join(known)}")
        return known[name]

    def shards(self, phase: str) -> Iterator[Shard]:
        """Yield the shards of a phase in training order, memory-mapped. Raises `InputError` for an unknown phase."""
        for facts in self.phase(phase).shards:
            yield Shard.open(self.folder / facts.file, vocab_size=self.manifest.tokenizer.vocab_size)

    def provenance(self, shard: ShardFacts) -> Iterator[Mapping[str, str]]:
        """Yield source, id, path and licence of each document of a shard, in order. Raises `CorpusError` for a damaged
        file."""
        path = self.folder / shard.provenance
        try:
            with path.open("rb") as file:
                for line in file:
                    yield msgspec.json.decode(line, type=dict[str, str])
        except (OSError, msgspec.DecodeError) as error:
            raise CorpusError(f"{path} is damaged", str(error), hint=_REMAKE) from None

    def said(self, shard: ShardFacts) -> Said:
        """Open the file that marks which tokens of a shard belong to answers of an assistant. Raises `CorpusError` for
        a damaged file."""
        return Said.open(self.folder / shard.said if shard.said else None, num_tokens=shard.tokens)

    def keys(self, shard: ShardFacts) -> U64:
        """Return a hash of the source and the id of each document of a shard: uint64 [D].

        It is the same in all epochs and phases, while the tokens may be in another order (fill-in-the-middle). Raises
        `CorpusError`."""
        names = (f"{one['source']}\0{one['id']}".encode() for one in self.provenance(shard))
        digests = (hashlib.blake2b(name, digest_size=8).digest() for name in names)
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


class PhaseTokens:
    """The documents of a phase, in memory-mapped shards. The tokens of all shards are numbered consecutively.

    `spans_D2`: int64 [D, 2], the first token of each document and the one after its last. `keys_D`: `Corpus.keys`.
    Raises `InputError` for an unknown phase, and `CorpusError` for damaged files."""

    def __init__(self, corpus: Corpus, phase: str) -> None:
        self._shards = tuple(corpus.shards(phase))
        self._said = tuple(map(corpus.said, corpus.phase(phase).shards))
        self._ends_S = np.cumsum([len(shard.tokens_T) for shard in self._shards], dtype=np.int64)
        parts, keys, first = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.uint64)], 0
        for facts, shard in zip(corpus.phase(phase).shards, self._shards, strict=True):
            parts.append(np.stack([shard.starts_D[:-1], shard.starts_D[1:]], 1) + first)
            keys.append(corpus.keys(facts))
            progress.tick()
            if len(keys[-1]) != len(shard):
                facts_of = f"it names {len(keys[-1]):,} documents, and {facts.file} has {len(shard):,}"
                raise CorpusError(f"{corpus.folder / facts.provenance} is damaged", facts_of, hint=_REMAKE)
            first += len(shard.tokens_T)
        self.spans_D2: I64 = np.concatenate(parts)
        self.keys_D: U64 = np.concatenate(keys)

    def tokens(self, start: int, stop: int) -> U32:
        """Return the tokens from `start` to `stop`, which are of one document, as a view into its file: uint32."""
        shard, first = self._place(start)
        return self._shards[shard].tokens_T[start - first : stop - first]

    def said(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens from `start` to `stop`, all of one document, belong to answers of an assistant:
        bool [stop - start]."""
        shard, first = self._place(start)
        return self._said[shard][start - first : stop - first]

    def _place(self, token: int) -> tuple[int, int]:
        """Return the shard of a token, and the number of the shard's first token."""
        shard = int(np.searchsorted(self._ends_S, token, side="right"))
        return shard, int(self._ends_S[shard - 1]) if shard else 0


def check_corpus(corpus: Corpus, only: str | None = None) -> Iterator[str]:
    """Verify the shards of all phases, or of the phase `only`. Yields the name of each correct shard.

    Checked are digests, counts, end tokens, and that every token id is in the vocabulary. Raises `CorpusError` for the
    first damaged shard."""
    tokenizer = corpus.manifest.tokenizer
    for phase in corpus.manifest.phases:
        if only is not None and phase.name != only:
            continue
        for facts in phase.shards:
            path = corpus.folder / facts.file
            for name, expected in facts.names.items():
                try:
                    found = file_digest(corpus.folder / name)
                except OSError as error:
                    raise CorpusError(f"{corpus.folder / name} cannot be read", str(error), hint=_REMAKE) from None
                if found != expected:
                    what = f"its SHA-256 is {found[:12]}, expected {expected[:12]}"
                    raise CorpusError(f"{corpus.folder / name} is damaged", what, hint=_REMAKE)
            shard = Shard.open(path, vocab_size=tokenizer.vocab_size)
            if (len(shard), len(shard.tokens_T)) != (facts.documents, facts.tokens):
                what = f"it has {len(shard):,} documents and {len(shard.tokens_T):,} tokens"
                raise CorpusError(f"{path} does not fit the manifest", what, hint=_REMAKE)
            for at in range(0, len(shard.tokens_T), 1 << 22):
                if (most := int(shard.tokens_T[at : at + (1 << 22)].max())) >= tokenizer.vocab_size:
                    what = f"the vocabulary has {tokenizer.vocab_size:,} tokens"
                    raise CorpusError(f"{path} has the token id {most:,}", what, hint=_REMAKE)
            ends = shard.starts_D[1:]
            if (np.diff(shard.starts_D) < 1).any() or (shard.tokens_T[ends - 1] != tokenizer.end_id).any():
                raise CorpusError(f"{path} has a document without an end token", hint=_REMAKE)
            if facts.said and (found_said := int(corpus.said(facts)[:].sum())) != facts.said_tokens:
                what = f"it marks {found_said:,} tokens, expected {facts.said_tokens:,}"
                raise CorpusError(f"{corpus.folder / facts.said} does not fit the manifest", what, hint=_REMAKE)
            yield facts.file
