"""Train a byte-level BPE tokeniser and save it as Hugging Face files. Torch-free; takes about a second.

Every byte is a token, so any text can be encoded. Digits stay single, so that a small model can copy and compare
numbers digit by digit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from etude.errors import TaskError
from etude.file_checksums import write_sums

PIECES = r"[ .]?[A-Za-z_]+|\d| ?[^\s\w]+|\n *| +|\s|\w"
"""Pre-tokenisation: merges stay within a word with the space or dot before it (`.py` and `.upper` are one token: 11 %
fewer tokens on the laptop example's corpus), a digit, a run of punctuation, or a line end with the next line's
indentation."""


def train_tokenizer(
    texts: Iterable[str],
    folder: Path | str,
    *,
    vocab_size: int,
    special_tokens: Sequence[str],
    chat_template: str,
    end_token: str = "<|end|>",
    pad_token: str = "<|pad|>",
) -> Tokenizer:
    """Train a tokeniser on `texts`, and write its Hugging Face files into `folder`.

    The files are tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja. Special tokens
    get the ids 0, 1, … in their order. `end_token` and `pad_token` are named in the configs if they are special tokens;
    generation stops at `end_token`. Raises `TaskError` when the vocabulary is too small for bytes and special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special_tokens):
        raise TaskError(
            f"a vocabulary of {vocab_size} is too small",
            f"it must have {len(alphabet)} bytes and {len(special_tokens)} special tokens",
            hint="raise model.vocab_size; the laptop example has 768",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos": end_token, "pad": pad_token}
    named = {kind: token for kind, token in named.items() if token in special_tokens}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "additional_special_tokens": list(special_tokens),
        **{f"{kind}_token": token for kind, token in named.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {f"{kind}_token_id": tokenizer.token_to_id(token) for kind, token in named.items()}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat_template)
    write_sums(folder)
    return tokenizer
