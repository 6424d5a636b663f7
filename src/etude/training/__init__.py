"""Training: the RL learner, and mid-training over a corpus.

Settings, corpus and tokeniser need no torch; names that need it are imported on first use.

>>> from etude.training import LearnerConfig
>>> LearnerConfig(lr=3e-4).clip_high
1.28
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from etude.training.config import LearnerConfig, LiveWeights, MidTrainingConfig
from etude.training.corpus import read_corpus, write_corpus

if TYPE_CHECKING:
    from etude.training.learner import TorchLearner
    from etude.training.mid_training import MidTrained, mid_train
    from etude.training.tokenizer import train_tokenizer

__all__ = [
    "LearnerConfig", "LiveWeights", "MidTrained", "MidTrainingConfig", "TorchLearner", "mid_train", "read_corpus",
    "train_tokenizer", "write_corpus",
]  # fmt: skip

_HOME = {
    "MidTrained": "mid_training", "TorchLearner": "learner", "mid_train": "mid_training",
    "train_tokenizer": "tokenizer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
