"""From texts to training shards: sources, filters, deduplication, decontamination, mixture. Usable alone, no torch.

`build_corpus` makes a corpus, and `Corpus` reads one:

    config = read_corpus_config("corpus.toml")
    corpus = build_corpus(config, Path("corpus"), jobs=8)
    for shard in corpus.shards("all"):
        shard.document(0)  # uint32 token ids, memory-mapped

Mid-training reads it (`[mid_training] corpus`). The laptop example's corpus of demonstrations is another one:
`etude.tasks.corpus`, `etude.training.corpus`.
"""

from etude.corpus.build import build_corpus
from etude.corpus.config import CorpusConfig, read_corpus_config
from etude.corpus.contamination import HeldOutIndex, HeldOutText
from etude.corpus.documents import DividedSource, Document, DocumentSource, Dropped
from etude.corpus.heldout import WithHeldOut
from etude.corpus.shards import Corpus, Manifest, Shard, check_corpus
from etude.secrets import find_secrets

__all__ = [
    "Corpus",
    "CorpusConfig",
    "DividedSource",
    "Document",
    "DocumentSource",
    "Dropped",
    "HeldOutIndex",
    "HeldOutText",
    "Manifest",
    "Shard",
    "WithHeldOut",
    "build_corpus",
    "check_corpus",
    "find_secrets",
    "read_corpus_config",
]
