"""A small tokeniser for tests: etude's special tokens, single digits, trained on a few lines."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.harness import ChatFormat, chat_template
from etude.harness.chat import SPECIAL_TOKENS

_TEXT = [
    "def price(n):\n    return n + 3\n",
    "edit calc.py 3 return a + b",
    "fix the failing test",
    "ls cat test submit ok",
]


def laptop_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 8, trainer)
    return tokenizer


@lru_cache(maxsize=1)
def laptop_chat() -> ChatFormat:
    return ChatFormat(laptop_tokenizer(), chat_template())
