"""What the processes of a build do: list, read, encode, write shards. Each part is on disk when its method returns."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from etude import progress
from etude.corpus.config import CorpusConfig
from etude.corpus.contamination import HeldOutIndex
from etude.corpus.encoding import Encoder
from etude.corpus.heldout import heldout_texts
from etude.corpus.pieces import (
    EncodedPiece,
    Job,
    Piece,
    encode_piece,
    piece_folder,
    pieces_of,
    read_piece,
    tokens_folder,
)
from etude.corpus.shards import HEADER, MAGIC, VERSION, HeldOutFacts, Said, Shard, ShardFacts
from etude.file_checksums import file_digest

I64 = npt.NDArray[np.int64]


class Work:
    """The steps of a corpus build, which worker processes call. `folder`: the folder of the corpus; unfinished files
    are in its subfolder `work`."""

    def __init__(self, config: CorpusConfig, folder: Path) -> None:
        self.config, self.folder, self.work = config, folder, folder / "work"
        self._pieces: dict[int, tuple[Piece, EncodedPiece]] = {}

    @cached_property
    def _heldout(self) -> HeldOutIndex:
        return HeldOutIndex.load(self.work / "heldout.npz")

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.load(self.config.tokenizer, self.config.fim, seed=self.config.seed)

    def index_heldout(self) -> HeldOutFacts:
        """Write the index of held-out texts. Every build writes it again, since the files may have changed."""
        index = HeldOutIndex.build(heldout_texts(self.config.heldout))
        path = self.work / "heldout.npz"
        scratch = path.with_name("heldout.tmp.npz")
        index.save(scratch)
        scratch.replace(path)
        digest = hashlib.sha256(index.grams_G.tobytes() + index.segments_G.tobytes() + index.needs_S.tobytes())
        return HeldOutFacts(texts=len(index.names), too_short=index.too_short, sha256=digest.hexdigest())

    def list_source(self, source: int) -> list[Any]:
        """Return the pieces of a source."""
        progress.begin(f"listing source {self.config.sources[source].name!r}")
        return pieces_of(self.config, source)

    def read(self, job: Job) -> None:
        """Read and filter a piece, unless this is done already."""
        read_piece(self.config, job, piece_folder(self.work, job.number), self._heldout)

    def encode(self, number: int, kept: npt.NDArray[np.bool_]) -> None:
        """Encode the kept documents of a piece, unless this is done already."""
        piece = Piece(piece_folder(self.work, number))
        encode_piece(piece, kept, tokens_folder(self.work, number), self._encoder)

    def shard(self, name: str, pieces_D: I64, places_D: I64, epochs_D: I64) -> tuple[ShardFacts, I64]:
        """Write a shard, unless it exists. Document i of the shard is at position `places_D[i]` of piece `pieces_D[i]`.

        `epochs_D`: how often each document was used before: in each epoch it is cut elsewhere for fill-in-the-middle.
        Returns the shard's entry in the manifest, and the number of tokens of each document: [D]."""
        path, provenance = self.folder / f"{name}.tokens", self.folder / f"{name}.jsonl"
        said = self.folder / f"{name}.said"
        documents = list(zip(pieces_D.tolist(), places_D.tolist(), epochs_D.tolist(), strict=True))
        has_chats = any(self._piece(piece)[0].said(place) for piece, place, _ in documents)
        if not provenance.exists():
            with self._written(provenance) as file:
                for piece, place in zip(pieces_D.tolist(), places_D.tolist(), strict=True):
                    progress.tick()
                    file.write(self._piece(piece)[0].provenance(place) + b"\n")
        if has_chats and not said.exists():
            with self._written(said) as file:
                file.write(np.packbits(self._said(documents), bitorder="little").tobytes())
        if not path.exists():  # the last of all
            starts = np.zeros(len(pieces_D) + 1, "<i8")
            with self._written(path) as file:
                file.seek(HEADER.size + starts.nbytes)
                for i, document in enumerate(documents):
                    progress.tick()
                    tokens = self._tokens(*document)
                    starts[i + 1] = starts[i] + len(tokens)
                    file.write(tokens.astype("<u4", copy=False).tobytes())
                file.seek(0)
                file.write(HEADER.pack(MAGIC, VERSION, self._encoder.facts.vocab_size, len(pieces_D), int(starts[-1])))
                file.write(starts.tobytes())
        progress.begin(f"reading {path}")
        shard = Shard.open(path, vocab_size=self._encoder.facts.vocab_size)
        marks = Said.open(said if has_chats else None, num_tokens=len(shard.tokens_T))
        facts = ShardFacts(
            file=path.name,
            provenance=provenance.name,
            documents=len(shard),
            tokens=len(shard.tokens_T),
            sha256=file_digest(path),
            provenance_sha256=file_digest(provenance),
            said=said.name if has_chats else "",
            said_tokens=int(marks[:].sum()),
            said_sha256=file_digest(said) if has_chats else "",
        )
        return facts, np.diff(shard.starts_D)

    @contextlib.contextmanager
    def _written(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a file in `work` that is synced and renamed into place at the end of the block."""
        scratch = self.work / f"{path.name}.{os.getpid()}.part"
        progress.begin(f"writing {path}")
        with scratch.open("wb") as file:
            yield file
            file.flush()
            progress.begin(f"writing {path}: fsync")
            os.fsync(file.fileno())
        scratch.rename(path)

    def _tokens(self, number: int, place: int, epoch: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of a document. In a later epoch it is encoded again if it has another FIM split."""
        piece, encoded = self._piece(number)
        again = epoch and self.config.fim.rate and not piece.said(place)
        if again and self._encoder.differs(key := piece.key(place), epoch):
            return self._encoder.encode(piece.text(place), key, epoch)
        return encoded.tokens(place)

    def _said(self, documents: list[tuple[int, int, int]]) -> npt.NDArray[np.bool_]:
        """Return which tokens of a shard the assistant said: [T] bool."""
        parts = []
        for number, place, epoch in documents:
            progress.tick()
            piece, encoded = self._piece(number)
            is_chat = encoded.has_chats and piece.said(place)
            parts.append(encoded.said(place) if is_chat else np.zeros(len(self._tokens(number, place, epoch)), bool))
        return np.concatenate(parts)

    def _piece(self, number: int) -> tuple[Piece, EncodedPiece]:
        if number not in self._pieces:
            encoded = EncodedPiece(tokens_folder(self.work, number))
            self._pieces[number] = (Piece(piece_folder(self.work, number)), encoded)
        return self._pieces[number]
