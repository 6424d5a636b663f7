"""Small corpora for the tests: a tokenizer of bytes, a folder of texts, a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from etude.config import build
from etude.corpus import CorpusConfig

END = "<|endoftext|>"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def tokenizer(path: Path, special: Sequence[str] = (END, *FIM)) -> Path:
    """Write a tokenizer whose tokens are bytes and these special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.save(str(path))
    return path


def texts(folder: Path, count: int = 6) -> Path:
    """Write different small modules into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        lines = [
            f"def function_{i}_{j}(first, second):\n    return first * {i * j + 7} - second // {j + 2}\n"
            for j in range(4)
        ]
        (folder / f"module_{i}.py").write_text("\n".join(lines))
    return folder


def config(tmp_path: Path, **changes: Any) -> CorpusConfig:
    """A config over the folder `texts` of a temporary path; `changes` replace its tables."""
    if not (tmp_path / "tokenizer.json").exists():
        tokenizer(tmp_path / "tokenizer.json")
    source = {"name": "own", "kind": {"kind": "folder", "path": str(tmp_path / "texts")}}
    raw: dict[str, Any] = {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}, "sources": [source]}
    return build(CorpusConfig, {**raw, **changes})
