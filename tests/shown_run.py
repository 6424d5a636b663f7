"""A run folder as a run leaves it, for the tests of the web pages: a real ledger, traces with tokens, weights, events.

Rollouts, texts and tokens are made up; everything is written by the code that writes it in a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.small_rollouts import TASK, graded
from tests.unit.dashboard.conftest import RunWriter
from tests.unit.harness.tokeniser import laptop_chat, laptop_tokenizer

from etude.config import to_toml
from etude.experience import Ledger, RolloutFiles, plan_batch, record_batch
from etude.harness import chat_template
from etude.loop.config import RunConfig
from etude.records import Completion, Rollout, RolloutSpec, Sampling, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Ending, Start, Turn, TurnKind
from etude.records.summary import summary_of
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.weights import Channel, Tensor

CHAT = laptop_chat()
Says = Callable[[str], tuple[str, str]]


def calm(rollout_id: str) -> tuple[str, str]:
    """(what the user says, what the model replies)."""
    return f"fix the failing test of {rollout_id}", "return a + b"


def turn(parent: int | None, said: str, reply: str, versions: list[Version], kind: TurnKind = TurnKind.ACT) -> Turn:
    """A turn whose reply was sampled by these versions, an equal part by each."""
    before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}]
    message = {"role": "user", "content": said}
    if parent is None:
        prompt_ids = CHAT.encode_prompt([message], {})
    else:
        prompt_ids = CHAT.continuation(before, [message], {}, ended=True)
    token_ids = np.array([*CHAT.encode(reply).tolist(), CHAT.end_id], np.int32)
    parts = np.array_split(np.arange(len(token_ids)), len(versions))
    rng = np.random.default_rng(len(token_ids))
    done = Completion(
        request_id="r",
        token_ids=token_ids,
        logprobs=-rng.exponential(0.4, len(token_ids)).astype(np.float32),
        routes=np.zeros((0, 0, 0), np.uint8),
        routes_start=0,
        spans=tuple(VersionSpan(one, len(some)) for one, some in zip(versions, parts, strict=True) if len(some)),
        stop_reason=StopReason.STOP,
        engine="engine-0",
    )
    start = Start.FIRST if parent is None else Start.NEXT
    sampling = Sampling(max_tokens=1 << 20, stop_token_ids=())
    return Turn(parent=parent, prompt_ids=prompt_ids, completion=done, sampling=sampling, kind=kind, start=start)


def made_rollout(rollout_id: str, says: Says, versions: list[Version]) -> Rollout:
    """A rollout of three turns, the last two of which branch from the first, and a side call."""
    said, reply = says(rollout_id)
    turns = (
        turn(None, said, reply, versions),
        turn(0, "ok", "submit", versions[-1:]),
        turn(0, "ok", "ls", versions[-1:]),
        turn(None, "name it", "title", versions[-1:], TurnKind.SIDE),
    )
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id.partition(".")[0],
        attempt=0,
        task=TASK,
        trace=Trace(turns),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=1.0,
        tool_s=0.5,
    )


class ShownRunFolder:
    """A run folder at `path` with `steps` trained steps of two groups of four; one more group is still running."""

    def __init__(self, path: Path, *, steps: int = 3, says: Says = calm, events: bool = True) -> None:
        self.path = path
        if events:
            writer = RunWriter(path)
            writer.everything(until="rl", rl_steps=steps)
            (path / "run.json").unlink()
            aside = path.rename(path.with_name(path.name + "-events"))
        self.run = RunFolder.create(path, config_toml=to_toml(RunConfig()), seed=0)
        if events:
            for name in ("events", "phases.json"):
                (aside / name).rename(path / name)
            shutil.rmtree(aside)
        (path / "tokenizer").mkdir()
        laptop_tokenizer().save(str(path / "tokenizer" / "tokenizer.json"))
        (path / "tokenizer" / "chat_template.jinja").write_text(chat_template())
        self.channel, self.versions = Channel(DirectoryStore(path / "weights")), list[Version]()
        self.ledger, self.files = Ledger(path / "ledger.sqlite", capacity=64), RolloutFiles(path / "rollouts")
        (path / "rollouts").mkdir(exist_ok=True)
        self.publish(0, [])
        for step in range(1, steps + 1):
            self.train(step, says)
        self.ledger.admit(self.spec("g900000.0"))
        self.ledger.move("g900000.0", "running")

    def spec(self, rollout_id: str) -> RolloutSpec:
        group_id = rollout_id.partition(".")[0]
        return RolloutSpec(rollout_id=rollout_id, group_id=group_id, attempt=0, task=TASK, seed=1, temperature=1.0)

    def publish(self, step: int, rollout_ids: list[str]) -> Version:
        tensors = {"w": Tensor("bf16", (64,), np.full(64, 0x3F80 + step, np.uint16))}
        parent = self.versions[-1] if self.versions else None
        self.versions.append(self.channel.publish(tensors, step=step, parent=parent, rollout_ids=rollout_ids).version)
        return self.versions[-1]

    def train(self, step: int, says: Says) -> None:
        groups = [f"g{step:06d}", f"g{step + 1000:06d}"]
        for group_id in groups:
            for i in range(4):
                rollout_id = f"{group_id}.{i}"
                self.ledger.admit(self.spec(rollout_id))
                self.ledger.move(rollout_id, "running")
                rollout = made_rollout(rollout_id, says, self.versions[-2:])
                summary = summary_of(rollout, self.files.write(rollout, durable=False))
                assert self.ledger.finish(summary, graded(float(i % 2)))
        found = [self.ledger.group(group_id) for group_id in groups]
        plan = plan_batch(found, batch_id=f"b{step:06d}", step=step, max_lag=4)
        _, ref = record_batch(self.path / "traces", plan, self.files.read)
        self.ledger.batch(ref)
        self.ledger.commit(ref.rollout_ids, self.publish(step, list(ref.rollout_ids)))

    def close(self) -> None:
        self.ledger.close()
