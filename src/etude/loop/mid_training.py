"""Mid-training as a program of its own: ``python -m etude.loop.mid_training --run DIR``.

Its ranks are those of the learner (`loop.ranks`), on several machines too; where `learner.ranks` is 1, there is one for
each core of this machine. When it or a rank is killed, it continues from its last checkpoint. The *copy probe* measures
a skill that is learned last and that RL cannot teach: given the error message of a test and the correct file, does the
model copy the edit correctly?
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.environments.memory import MemoryMachine
from etude.errors import EtudeError
from etude.harness import ChatFormat, standard_tools
from etude.loop.config import RunConfig, open_tasks, read_config
from etude.loop.limits import start_model_config
from etude.loop.processes import EXIT_RESTART
from etude.models import Transformer
from etude.models.attention import Packed
from etude.numerics.parallel import RankLost
from etude.records.wire import I32
from etude.rollouts import demonstrate
from etude.run import RunFolder
from etude.tasks.scripts import WithCopyProbe
from etude.telemetry import Telemetry
from etude.training.batches import group_by_budget
from etude.training.data_parallel import RankDied
from etude.training.mid_training import Job, MidTrained, begin, default_ranks, end, run_job, train
from etude.training.process_group import ProcessGroup

FORWARD_TOKENS = 8192  # of one forward pass of the copy probe
PROBE_TASKS, PROBE_FIRST = 128, 5_000_000
"""Training tasks whose indices are far from those that demonstrations and rollouts use."""


@dataclass(frozen=True)
class CopyProbe:
    """Measures how well a model copies: the share of texts whose end it predicts exactly.

    The end of text i is its last `num_answer[i]` tokens; each must be the model's first choice. Every rank of
    mid-training gets a pickled copy and calls it with its model."""

    texts: tuple[I32, ...]
    num_answer: tuple[int, ...]

    @torch.no_grad()
    def __call__(self, model: Transformer) -> float:
        num_right = 0
        for part in group_by_budget([len(text) for text in self.texts], FORWARD_TOKENS):  # bounds the memory of logits
            device = model.cos.device
            tokens = [torch.from_numpy(text).long().to(device) for text in self.texts[part]]
            lengths = [len(t) - 1 for t in tokens]
            cache = Packed(lengths, model.operators, device=device)
            logits, _ = model(torch.cat([t[:-1] for t in tokens]), cache)
            right = torch.split(logits.argmax(-1) == torch.cat([t[1:] for t in tokens]), lengths)
            num_right += sum(bool(r[-n:].all()) for r, n in zip(right, self.num_answer[part], strict=True))
        return num_right / len(self.texts)


def copy_probe(run: RunFolder, config: RunConfig, *, context_tokens: int) -> CopyProbe | None:
    """Build the copy probe of the run's task source from its texts of at most `context_tokens`; None if it has none."""
    source = open_tasks(config, canaries=False)
    if not isinstance(source, WithCopyProbe):
        return None
    chat, tools = ChatFormat.load(run / "tokenizer"), standard_tools(config.harness.tools).with_standard()
    texts, num_answer = [], []
    for index in range(PROBE_FIRST, PROBE_FIRST + PROBE_TASKS):
        task, script, end = source.copy_probe(index)
        machine = MemoryMachine({path: text.encode() for path, text in task.files.items()})
        talk = demonstrate(task, script, tools, machine)
        text = chat.encode_conversation(talk[:-1], tools.signatures)  # without the edit's answer
        if len(text) <= context_tokens:
            texts.append(text)
            num_answer.append(len(chat.encode(end)) + 1)  # plus the end of the turn
    return CopyProbe(tuple(texts), tuple(num_answer)) if texts else None


class MidTraining:
    """Mid-training of a run, or one rank of it. `train` is the call that each rank makes (`loop.ranks`)."""

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry, *, group: ProcessGroup) -> None:
        self._job, self._group = job_of(run, config, telemetry), group

    def train(self) -> MidTrained:
        """Train the model, and write the result."""
        return train(self._job, self._group)


def job_of(run: RunFolder, config: RunConfig, telemetry: Telemetry) -> Job:
    """Return the job of a run: a new model, or its starting checkpoint."""
    start = None if config.start is None else run / "checkpoints" / "start"
    model = config.model if start is None else start_model_config(start)
    return Job(
        config.mid_training,
        model,
        run / "checkpoints" / "mid",
        corpus=run / "corpus" if start is None else None,
        ranks=default_ranks(config.learner),
        seed=config.seed,
        start=start,
        assets=run / "tokenizer",
        telemetry=(telemetry.path, telemetry.process),
        probe=copy_probe(run, config, context_tokens=model.context_tokens),
        learner=config.learner,
        numerics=config.numerics,
    )


def _train_with_ranks(run: RunFolder, config: RunConfig, telemetry: Telemetry, *, at: str, away: int) -> None:
    """Train as rank 0 of `learner.ranks`, of which `away` connect from other machines to the address `at`."""
    from etude.loop.ranks import Leader

    job = job_of(run, config, telemetry)
    if begin(job) is not None:
        return
    leader = Leader(run, config, telemetry, program="mid-training", at=at, away=away)
    try:
        with leader.call("train"):
            end(job, train(job, leader.join()))
    except RankLost as error:
        leader.lost(error)


def main() -> int:
    """Mid-train the model of the run ``--run DIR``, or its starting checkpoint. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--ranks-at", default="")
    parser.add_argument("--ranks-away", type=int, default=0)
    args = parser.parse_args()
    run = RunFolder.open(args.run)
    config = read_config(run)
    telemetry = Telemetry(run / "events" / "learner.jsonl", process="learner")
    torch.set_num_threads(1)
    try:
        if config.learner.ranks > 1:
            _train_with_ranks(run, config, telemetry, at=args.ranks_at, away=args.ranks_away)
        else:
            run_job(job_of(run, config, telemetry))
    except RankDied as died:
        print(died, file=sys.stderr)
        return EXIT_RESTART
    except EtudeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
