"""The document source `rollouts`: rollouts with a high reward, from the traces of runs, by their token ids.

Tokens that the policy sampled are marked (`Document.said`). A mid-training phase with `loss = "said"` on them is
rejection sampling: supervised fine-tuning on rewarded rollouts. Runs may still be going on."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from etude import progress
from etude.corpus.chats import check_tokenizer
from etude.corpus.config import TokenizerConfig
from etude.corpus.documents import MAX_BYTES, Document, Dropped
from etude.corpus.encoding import read_tokenizer
from etude.corpus.sources import Divided
from etude.errors import InputError
from etude.experience.packing import paths
from etude.experience.trace_reader import RecordedRollout, read_outcomes, read_step
from etude.experience.traces import PRODUCTION_SCHEME, recorded_steps, trace_path
from etude.harness.tokenizer import SafeTokenizer
from etude.records.rollout import Graded, Turn, TurnKind
from etude.records.task import CANARY
from etude.records.wire import Bools

_UNSAID = (TurnKind.SIDE, TurnKind.REFUSED)


@dataclass(frozen=True)
class Rollouts(Divided):
    """A source of the rollouts with a high enough reward in the traces of runs, by their recorded token ids.

    - `runs`: folders of runs, whose tokenizer must be that of the corpus.
    - `min_reward`: the smallest reward of a rollout that is kept.
    - `term`: the reward is the raw value of this term, such as "grade"; "": the composed reward that the run recorded.
    - `max_per_task`: at most so many rollouts of a task, over all runs: the best, and of equal ones the latest. 0: no
      limit (the default).

    Traces have training tasks only. Canaries, and rollouts of production (`etude learn`), are left out. Each path of a
    rollout, from its first turn to a leaf, is one document, if it has tokens to train on. Tokens of refused summaries
    and side calls are in the document and not in the loss. "Latest" is the highest step. The constructor raises
    `InputError` for invalid settings; `pieces` raises it for a run without traces, and if no run has such a rollout."""

    runs: tuple[Path, ...]
    min_reward: float = 1.0
    term: str = ""
    max_per_task: int = 0

    def __post_init__(self) -> None:
        if not self.runs or self.max_per_task < 0 or not math.isfinite(self.min_reward):
            facts = f"{len(self.runs)} runs, min_reward = {self.min_reward}, max_per_task = {self.max_per_task}"
            hint = "name at least one run, a finite min_reward, and a max_per_task of at least 0"
            raise InputError("a source of rollouts cannot have these settings", facts, hint=hint)
        if len({run.resolve() for run in self.runs}) < len(self.runs):
            facts = f"runs = {[str(run) for run in self.runs]}"
            raise InputError("a source of rollouts names a run twice", facts, hint="name each run once")

    def check_tokenizer(self, sha256: str) -> None:
        """Raise `ConfigError` if the corpus has another tokenizer than one of the runs.

        `sha256`: the SHA-256 of the corpus's tokenizer.json."""
        for run in self.runs:
            if not (run / "run.json").is_file():
                raise InputError(f"{run} is no run", "it has no run.json", hint="give the folder of a run, as runs/own")
            check_tokenizer(run / "tokenizer", sha256, noun="run of the rollouts")

    def pieces(self) -> list[list[Any]]:
        """Return one piece per trace file with kept rollouts, by run and step: [run, step, mtime of the file in ns,
        rollout ids].

        Raises `InputError` as in the class, and `LedgerError` for a damaged trace."""
        found = list[tuple[float, int, int, RecordedRollout]]()
        for number, run in enumerate(self.runs):
            steps = recorded_steps(run / "traces")
            if not steps:
                hint = "give the folder of a run; traces are deleted as retention.disk_gb requires"
                raise InputError(f"{run} has no traces", "there is no traces/batch-*.parquet", hint=hint)
            for step in steps:
                progress.begin(f"reading rewards of step {step} of {run}")
                settings, rollouts = read_outcomes(trace_path(run / "traces", step))
                if settings.get("scheme") != PRODUCTION_SCHEME:
                    found += [(self._reward(one), number, step, one) for one in rollouts]
        wanted = [one for one in found if one[0] >= self.min_reward]
        if not wanted:
            best = max((reward for reward, *_ in found), default=-math.inf)
            facts = f"the best reward is {best:g}" if best > -math.inf else "none has a reward"
            if self.term and best == -math.inf:
                outcomes = [one.outcome for *_, one in found if isinstance(one.outcome, Graded)]
                terms = sorted({term for outcome in outcomes for term in outcome.values})
                facts = f"none has a term {self.term!r}; their terms: {', '.join(terms) or 'none'}"
            hint = "lower min_reward, or set term to a term of the reward"
            raise InputError(
                f"no rollout has a reward of at least {self.min_reward:g}", f"{len(found)} rollouts; {facts}", hint=hint
            )
        of_task = Counter[str | None]()
        kept = list[tuple[int, int, str]]()
        for _, number, step, one in sorted(wanted, key=lambda one: (-one[0], -one[2], one[1], one[3].rollout_id)):
            of_task[one.task_id] += 1
            if not self.max_per_task or of_task[one.task_id] <= self.max_per_task:
                kept.append((number, step, one.rollout_id))
        pieces = []
        for (number, step), some in itertools.groupby(sorted(kept), key=lambda one: one[:2]):
            changed = (self.runs[number] / "traces" / f"batch-{step:06d}.parquet").stat().st_mtime_ns
            pieces.append([str(self.runs[number]), step, changed, [rollout_id for *_, rollout_id in some]])
        return pieces

    def _reward(self, one: RecordedRollout) -> float:
        """Return the reward of a rollout; minus infinity without one, for a canary and where the term is unknown."""
        if not isinstance(one.outcome, Graded) or (one.family or "").startswith(CANARY):
            return -math.inf
        value = one.outcome.values.get(self.term) if self.term else one.reward
        return -math.inf if value is None else value

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece that `pieces` returned."""
        run, step, _, rollout_ids = piece
        wanted = frozenset(rollout_ids)
        progress.begin(f"reading step {step} of {run}")
        for tree in read_step(trace_path(Path(run) / "traces", step), routes=False).trees:
            if tree.rollout.rollout_id in wanted:
                for number, path in enumerate(paths(tree.trace, learns=_is_said)):
                    name = f"{Path(run).name}/{tree.rollout.rollout_id}" + (f"/{number}" if number else "")
                    if path.mask.any():
                        yield self._document(name, path.token_ids.tolist(), path.mask)
                    progress.begin(f"reading step {step} of {run} after {name}")

    def _document(self, name: str, token_ids: list[int], mask: Bools) -> Document | Dropped:
        if max(token_ids) >= self._tokenizer.vocab_size:
            return Dropped(name, "unknown-token")
        text = self._tokenizer.decode(token_ids, special=True)
        if len(text.encode()) > MAX_BYTES:
            return Dropped(name, "too-large")
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        said = tuple((int(first), int(stop)) for first, stop in edges)
        return Document(name, text, said=said, token_ids=tuple(token_ids))

    @cached_property
    def _tokenizer(self) -> SafeTokenizer:
        return read_tokenizer(TokenizerConfig(self.runs[0] / "tokenizer"))[0]


def _is_said(turn: Turn) -> bool:
    return turn.kind not in _UNSAID
