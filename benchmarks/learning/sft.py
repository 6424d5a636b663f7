"""What a last phase of mid-training on chats does to the loss of held-out answers, with loss on them or on all tokens.

A tiny model is trained in three phases: short texts, longer texts (with YaRN), and chats. The third is left out, has
its loss on all tokens, or on what the assistant says; it reads the same batches of chats in both cases. Reported is the
loss of the answers of other chats, in nats per token, for each seed of weights and order. The texts are generated
modules, and a chat asks for one of three words by its place.

`python -m benchmarks.learning.sft [--seeds 0 1 2]`
Some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.report import report
from etude.config import build
from etude.corpus import Corpus, CorpusConfig, build_corpus
from etude.corpus.shards import PhaseTokens
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.models import ModelConfig, load_model
from etude.models.attention import Packed
from etude.tasks.corpus import code_documents
from etude.training import MidTrainingConfig, mid_train
from etude.training.config import LossTokens, MidTrainingPhase

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "knoll", "larch")
PLACES = ("first", "second", "third")
END = "<|endoftext|>"
SIZES = ModelConfig(
    vocab_size=265, hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, expert_size=64,
    num_experts=4, top_k=2, context_tokens=128,
)  # fmt: skip
TEXT = MidTrainingPhase("text", num_tokens=60_000, decay_from=1.0)
LONG = MidTrainingPhase("long", num_tokens=30_000, document_tokens=256, rope_factor=2.0, decay_from=1.0)
CHATS = MidTrainingPhase("chats", num_tokens=80_000, document_tokens=256)
WAYS = {
    "before": (TEXT, LONG),
    "loss on all tokens": (TEXT, LONG, CHATS),
    "loss on what is said": (TEXT, LONG, replace(CHATS, loss=LossTokens.SAID)),
}


def checkpoint(folder: Path) -> Path:
    """Write a tokenizer of bytes with etude's chat format."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL_TOKENS, END])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_template())
    return folder


def chats(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Make chats of two questions each. Those of another seed have other words in other orders."""
    rng, found = random.Random(f"chats {seed}"), []
    for _ in range(count):
        messages = []
        for _ in range(2):
            words, place = rng.sample(WORDS, 3), rng.randrange(3)
            messages.append({"role": "user", "content": f"{' '.join(words)}: which is the {PLACES[place]}?"})
            messages.append({"role": "assistant", "content": f"The {PLACES[place]} is {words[place]}."})
        found.append({"messages": messages})
    return found


def corpus(folder: Path, base: Path, *, num_chats: int, seed: int) -> Corpus:
    """Build a corpus with the phases text, long and chats."""
    (folder / "texts").mkdir(parents=True)
    for i, text in enumerate(code_documents(count=200, seed=0)):
        (folder / "texts" / f"{i}.py").write_text(text)
    lines = [json.dumps(one) + "\n" for one in chats(num_chats, seed=seed)]
    (folder / "chats.jsonl").write_text("".join(lines))
    kinds = {
        "texts": {"kind": "folder", "path": str(folder / "texts")},
        "chats": {"kind": "chats", "files": [str(folder / "chats.jsonl")], "checkpoint": str(base)},
    }
    tokens = {"text": 60_000, "long": 30_000, "chats": 1_000_000}
    config = {
        "tokenizer": {"path": str(base), "end": END},
        "sources": [{"name": name, "kind": kind, "max_epochs": 2.0} for name, kind in kinds.items()],
        "phases": [
            {"name": name, "tokens": size, "mix": {"chats" if name == "chats" else "texts": 1}}
            for name, size in tokens.items()
        ],
        "near": {"threshold": 1.0},
        "quality": {"max_repeated": 1.0},
    }
    return build_corpus(build(CorpusConfig, config), folder / "out")


@torch.no_grad()
def answer_loss(model_folder: Path, heldout: Corpus) -> float:
    """Return the mean loss of all tokens that the assistant says, in nats."""
    model, documents = load_model(model_folder).eval(), PhaseTokens(heldout, "chats")
    losses = []
    for start, stop in np.unique(documents.spans_D2, axis=0).tolist():
        tokens = torch.from_numpy(documents.tokens(start, stop).astype(np.int64))
        said = torch.from_numpy(documents.said(start, stop))
        logits, _ = model(tokens[:-1], Packed([len(tokens) - 1], model.operators))
        losses.append(F.cross_entropy(logits[said[1:]], tokens[1:][said[1:]], reduction="none"))
    return float(torch.cat(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = checkpoint(folder / "base")
        trained_on = corpus(folder / "train", base, num_chats=1_000, seed=0)
        heldout = corpus(folder / "heldout", base, num_chats=60, seed=1)
        config = MidTrainingConfig(
            corpus=trained_on.folder, batch_tokens=1024, document_tokens=128, lr=4e-3, warmup_steps=5,
            eval_every=1_000, checkpoint_every=1_000, heldout_documents=0,
        )  # fmt: skip
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in args.seeds:
            for number, (way, phases) in enumerate(WAYS.items()):
                out = folder / f"{seed}-{number}"
                settings = replace(config, phases=phases)
                mid_train(settings, None, out, model=SIZES, ranks=1, seed=seed, assets=base)
                losses[way].append(answer_loss(out, heldout))
                print(f"seed {seed}, {way}: {losses[way][-1]:.3f} nats per token of a held-out answer", flush=True)
        said = sum(shard.said_tokens for shard in trained_on.phase("chats").shards)
        facts = {"said_share": said / trained_on.phase("chats").tokens, "chat_tokens": CHATS.num_tokens}
        report("sft", {"seeds": args.seeds, **facts, "answer_loss": losses})


if __name__ == "__main__":
    main()
