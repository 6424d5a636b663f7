"""What a manifest says about the sources and the phases of a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from etude.corpus.config import CorpusConfig
from etude.corpus.duplicates import Duplicates
from etude.corpus.mixture import Drawn
from etude.corpus.pieces import Counts, Pieces
from etude.corpus.shards import DrawnFacts, PhaseFacts, ShardFacts, SourceFacts


def counts_of(config: CorpusConfig, pieces: Pieces, duplicates: Duplicates) -> dict[str, Counts]:
    """Return the counts of documents of each source. Duplicates are counted as dropped."""
    found = {source.name: Counts() for source in config.sources}
    for job, piece in zip(pieces.jobs, pieces, strict=True):
        found[config.sources[job.source].name].add(piece.counts)
    for reason, which_N in duplicates.by_reason.items():
        for index, source in enumerate(config.sources):
            for document in np.flatnonzero(which_N & (pieces.sources_N == index)).tolist():
                meta, size = _described(pieces, document)
                same, _ = _described(pieces, int(duplicates.earlier_N[document]))
                found[source.name].undo(meta["licence"], size)
                found[source.name].drop(reason, f"{meta['id']} has {same['id']} of {same['source']}")
    return found


def _described(pieces: Pieces, document: int) -> tuple[dict[str, str], int]:
    """Return the provenance of a document, and the bytes of its text."""
    piece, place = pieces.find(document)
    meta = msgspec.json.decode(piece.provenance(place), type=dict[str, str])
    return meta, int(piece.ends[place + 1, 0] - piece.ends[place, 0])


def source_facts(counts: Mapping[str, Counts], num_tokens: Mapping[str, int]) -> dict[str, SourceFacts]:
    """Return what the manifest records about each source. `num_tokens`: the number of tokens of each source's kept
    documents."""
    return {
        name: SourceFacts(
            documents=one.documents,
            kept=sum(one.licences.values()),
            bytes=one.bytes,
            tokens=num_tokens[name],
            licences=dict(sorted(one.licences.items())),
            dropped=dict(sorted(one.dropped.items())),
            redacted=dict(sorted(one.redacted.items())),
            examples=dict(sorted(one.examples.items())),
        )
        for name, one in counts.items()
    }


def phase_facts(drawn: Drawn, num_tokens: Mapping[str, int], shards: Sequence[ShardFacts]) -> PhaseFacts:
    """Return what the manifest records about a phase. `num_tokens`: the number of tokens from each source in it."""
    return PhaseFacts(
        name=drawn.name,
        documents=len(drawn.documents_D),
        tokens=sum(shard.tokens for shard in shards),
        missing_tokens=drawn.missing_tokens,
        sources={
            name: DrawnFacts(documents=documents, tokens=num_tokens[name], epochs=epochs)
            for name, (documents, _, epochs) in drawn.by_source.items()
        },
        shards=tuple(shards),
    )
