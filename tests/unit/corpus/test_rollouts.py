"""The source `rollouts`: solved rollouts of a run, by their recorded token ids, with what the policy said marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests import small_rollouts as small
from tests.unit.corpus import make

from etude.corpus import Corpus, build_corpus, check_corpus
from etude.corpus.rollouts import Rollouts
from etude.corpus.shards import PhaseTokens
from etude.errors import ConfigError, InputError
from etude.experience import Finished, Group, plan_batch, record_batch
from etude.experience.traces import PRODUCTION_SCHEME
from etude.records import Completion, Graded, Rollout, Sampling, Trace, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Turn, TurnKind
from etude.records.summary import StoredFile, summary_of
from etude.records.task import CANARY


def ids(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text).ids, np.int32)


class Run:
    """A run folder with a tokenizer and traces."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        (folder / "tokenizer").mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        make.tokenizer(folder / "tokenizer" / "tokenizer.json")
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self.half = int(self.tokenizer.token_to_id("Ã"))  # byte 0xC3 alone is no character

    def turn(self, parent: int | None, prompt: str, said: str, kind: TurnKind = TurnKind.ACT) -> Turn:
        sampled = np.append(ids(self.tokenizer, said), np.int32(self.half))
        completion = Completion(
            request_id="r", token_ids=sampled, logprobs=np.full(len(sampled), -1.0, np.float32),
            routes=np.zeros((0, 0, 0), np.uint8), routes_start=0, spans=(VersionSpan(small.version(0), len(sampled)),),
            stop_reason=StopReason.STOP, engine="engine-0",
        )  # fmt: skip
        sampling = Sampling(max_tokens=64, stop_token_ids=(), top_p=0.9)
        return Turn(
            parent=parent, prompt_ids=ids(self.tokenizer, prompt), completion=completion, sampling=sampling, kind=kind
        )

    def rollout(self, rollout_id: str, task: str, said: str, family: str = "fix") -> Rollout:
        turns = (
            self.turn(None, f"task {task}: ", f"edit {said}"),
            self.turn(0, "done? ", f"submit {said}"),
            self.turn(0, "summary? ", "refused", TurnKind.REFUSED),
            self.turn(None, "title? ", "a title", TurnKind.SIDE),
        )
        made = small.rollout(rollout_id, Trace(turns))
        return msgspec.structs.replace(
            made, task=msgspec.structs.replace(made.task, instruction=f"task {task}", family=family)
        )

    def record(self, step: int, groups: dict[str, Sequence[float]], *, family: str = "fix", scheme: str = "") -> None:
        """Write the trace of a step: for each task the rewards of its rollouts."""
        stored: dict[StoredFile, Rollout] = {}
        made = []
        for number, (task, rewards) in enumerate(groups.items()):
            group_id = f"g{step * 10 + number:06d}"
            finished = []
            for i, reward in enumerate(rewards):
                one = self.rollout(f"{group_id}.{i}", task, f"{task}{i}", family)
                place = StoredFile(len(stored), f"{len(stored):064d}")
                stored[place] = one
                outcome: Graded = small.graded(reward)
                finished.append(Finished(rollout_id=one.rollout_id, outcome=outcome, summary=summary_of(one, place)))
            group_ids = tuple(one.rollout_id for one in finished)
            made.append(Group(group_id=group_id, rollout_ids=group_ids, finished=tuple(finished)))
        plan = plan_batch(made, batch_id=f"b{step}", step=step, max_lag=99)
        if scheme:
            plan = msgspec.structs.replace(plan, rewards={**plan.rewards, "scheme": scheme})

        def read(summary: Any) -> Rollout:
            return stored[summary.stored]

        (self.folder / "traces").mkdir(exist_ok=True)
        record_batch(self.folder / "traces", plan, read)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "runs" / "first")
    found.record(1, {"a": [1.0, 0.0, 1.0], "b": [0.0, 0.5, 0.0]})
    found.record(2, {"c": [1.0, 1.0, 1.0]})  # no sample: all are equally good
    found.record(3, {"d": [1.0, 1.0]}, family=f"{CANARY} fix")
    found.record(4, {"e": [1.0, 1.0]}, scheme=PRODUCTION_SCHEME)
    return found


def built(run: Run, tokenizer: Path | None = None, **settings: Any) -> Corpus:
    folder = run.folder.parent.parent
    kind = {"kind": "rollouts", "runs": [str(run.folder)], **settings}
    config = make.config(
        folder,
        tokenizer={"path": str(tokenizer or run.folder / "tokenizer")},
        sources=[{"name": "solved", "kind": kind}],
    )
    return build_corpus(config, folder / "out")


def test_solved_rollouts_are_in_the_shard_by_their_recorded_ids_and_what_was_said_is_marked(run: Run) -> None:
    corpus = built(run)
    list(check_corpus(corpus))
    (phase,) = corpus.manifest.phases
    tokens = PhaseTokens(corpus, phase.name)
    found = {}
    for start, stop in tokens.spans_D2.tolist():
        document, said = tokens.tokens(start, stop), tokens.said(start, stop)
        found[run.tokenizer.decode(document[:-1].tolist())[:40]] = (document, said)
    assert len(found) == phase.documents == 5, "both of a, all of c; none of b, of the canary, and of production"
    one = run.rollout("g000010.2", "a", "a2")
    path = one.trace.path(1)
    document, said = next(pair for text, pair in found.items() if text.startswith("task a: edit a2"))
    assert document.tolist() == [*path.token_ids.tolist(), corpus.manifest.tokenizer.end_id]
    assert said.tolist() == [*path.mask.tolist(), False]
    assert run.half in document[said]
    assert run.tokenizer.encode(run.tokenizer.decode([run.half])).ids != [run.half]


def test_a_refused_summary_and_a_side_call_are_not_said(run: Run) -> None:
    source = Rollouts((run.folder,))
    texts = [one.text for one in source.documents()]
    assert len(texts) == 5
    assert not any("refused" in text or "title" in text for text in texts)


def test_the_reward_may_be_a_term_and_a_task_has_at_most_so_many_of_the_best_and_latest(run: Run) -> None:
    run.record(5, {"a": [1.0, 0.0], "c": [0.0, 0.7]})
    names = lambda **settings: [one.id for one in Rollouts((run.folder,), **settings).documents()]  # noqa: E731
    assert names(max_per_task=1) == ["first/g000020.0", "first/g000050.0"]
    assert "first/g000051.1" in names(term="tests", min_reward=0.6)
    assert len(names(term="tests", min_reward=0.6)) == 7
    with pytest.raises(InputError, match="none has a term 'unknown'; their terms: grade, tests"):
        names(term="unknown")


def test_what_cannot_be_a_source_is_refused(run: Run, tmp_path: Path) -> None:
    make.tokenizer(tmp_path / "other.json", [make.END])
    with pytest.raises(ConfigError, match="the run of the rollouts has another tokenizer than the corpus"):
        built(run, tokenizer=tmp_path / "other.json")
    with pytest.raises(InputError, match=r"no rollout has a reward of at least 2: .* the best reward is 1"):
        built(run, min_reward=2.0)
    with pytest.raises(InputError, match="names a run twice"):
        Rollouts((run.folder, run.folder))
    with pytest.raises(InputError, match="away is no run"):
        built(run, runs=[str(tmp_path / "away")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty has no traces"):
        Rollouts((tmp_path / "empty",)).pieces()
    for settings in ({"runs": ()}, {"max_per_task": -1}, {"min_reward": float("nan")}):
        with pytest.raises(InputError, match="cannot have these settings"):
            replace(Rollouts((run.folder,)), **settings)
