"""Tokens a second of mid-training with the laptop example's model and batches: two ranks, one thread each.

Texts are random tokens with lengths like the example's. The start of processes, the held-out loss and the result are
not counted.

`python -m benchmarks.learner.mid_training [--tokens 150000] [--ranks 2] [--optimizer adamw]`
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.report import report
from etude.config import build, read
from etude.loop.config import RunConfig
from etude.telemetry import Telemetry, read_events
from etude.training import MidTrainingConfig, mid_train, write_corpus
from etude.training.config import OptimizerKind

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop" / "config.toml"
WARM = 5  # events of the first seconds that are not counted


def texts(num_tokens: int, vocab_size: int, longest: int) -> list[np.ndarray]:
    draw, found = np.random.default_rng(0), []
    while sum(map(len, found)) < num_tokens:
        found.append(draw.integers(0, vocab_size, draw.integers(40, longest)).astype(np.int32))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--optimizer", type=OptimizerKind, default=OptimizerKind.ADAMW)
    parser.add_argument("--sharded", action="store_true", help="FSDP2, where the model is held by each rank otherwise")
    args = parser.parse_args()
    model = build(RunConfig, read(LAPTOP)).model
    config = MidTrainingConfig(num_tokens=args.tokens, optimizer=args.optimizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus", texts(args.tokens, model.vocab_size, config.document_tokens))
        telemetry = Telemetry(folder / "events" / "learner.jsonl", process="learner")
        settings = {"replicated": False} if args.sharded else {}
        out = folder / "mid"
        mid_train(config, folder / "corpus", out, model=model, ranks=args.ranks, telemetry=telemetry, **settings)
        telemetry.close()
        steps = [event for event in read_events(folder / "events") if event["kind"] == "mid.step"]
    first, last = steps[WARM if len(steps) > 2 * WARM else 0], steps[-1]
    used = resource.getrusage(resource.RUSAGE_CHILDREN if args.ranks > 1 else resource.RUSAGE_SELF)
    rate = (last["tokens"] - first["tokens"]) / (last["t"] - first["t"])
    numbers = {"tokens_per_s": round(rate), "cpu_s": round(used.ru_utime + used.ru_stime, 1), "loss": last["loss"]}
    report("mid_training", {"ranks": args.ranks, "sharded": args.sharded, "optimizer": str(args.optimizer), **numbers})


if __name__ == "__main__":
    main()
