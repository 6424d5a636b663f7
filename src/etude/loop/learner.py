"""The learner process: holds the weights, trains them, and publishes them.

Torch runs in its own thread, so that the process notices at once when the conductor ends. `LearnerProcess` has the
methods of that thread; `handlers` maps RPC calls to them. Only `published` waits in another thread, so that training
continues while a version is encoded and written. Batches are passed by reference: rank 0 makes a step's batch from the
rollout files that workers stored and records it; the other ranks read the record."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from etude import __version__, progress
from etude.config import to_plain
from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience import read_trace, record_batch
from etude.experience.hints import HintFormat
from etude.experience.packing import reference_samples
from etude.experience.traces import trace_path
from etude.loop import child
from etude.loop.config import RunConfig, read_config
from etude.loop.export import export_version
from etude.loop.hint_format import hint_format
from etude.loop.locations import rollout_files, traces_folder, weights_store
from etude.loop.parity import Defence, OverBudget
from etude.loop.rpc import Handler
from etude.numerics.factory import operators_for
from etude.numerics.parallel import RankLost
from etude.records import Batch
from etude.records.adapter import BASE_CHANNEL
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef, RolloutSummary
from etude.run import RunFolder, host_info
from etude.scratch import ScratchDirectory
from etude.telemetry import Telemetry
from etude.training import TorchLearner
from etude.training.batches import group_by_budget
from etude.training.learner_plugins import plugin_identities
from etude.training.process_group import SINGLE_PROCESS, ProcessGroup
from etude.training.reference import Reference
from etude.weights import Channel
from etude.weights.chain.channel import publish_once
from etude.weights.chain.publisher import Writer
from etude.weights.chain.signing import read_signer
from etude.weights.shards.sharded import ShardedChannel

if TYPE_CHECKING:  # only a learner of several ranks loads them
    from etude.loop.ranks import Leader
    from etude.training.sharded import ShardedProcessGroup

TRACES_HINT = "every rank must have access to the run's traces: its folder, or the bucket of stores.traces"
K1_TOKENS = 1 << 20  # tokens of rollouts in memory at once when they are compared with the reference
PREFIXES, SHARED = "prefixes", "shared"  # in `computed_by`; traces of earlier releases lack it: they shared none
NUM_THREADS = 1  # of torch: with more, matrix products sum in a different order


def make_learner(
    config: RunConfig,
    channel: Writer | None,
    reference: Reference | None,
    *,
    refuse_mismatch: bool = True,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TorchLearner:
    """Create the learner of a config, or one rank of it (`group`).

    `channel`: where it publishes weights; None: nowhere. `reference`: the reference policy of the KL term and of the
    DPO loss; None: neither is used. `refuse_mismatch`: False: the learner does not stop if its probabilities differ
    from those of the engines by more than the parity budget."""
    stops = config.parity.over_budget is OverBudget.STOP
    return TorchLearner(
        config.learner,
        channel=channel,
        num_steps=config.rl.steps,
        temperature=config.rl.temperature,
        refuse_mismatch=refuse_mismatch and stops,
        reference=reference,
        numerics=config.numerics,
        group=group,
        seed=config.seed,
    )


def reference_policy(
    run: RunFolder, config: RunConfig, group: ProcessGroup = SINGLE_PROCESS, *, checkpoint: Path | None = None
) -> Reference:
    """Load the reference policy of the KL term and of the DPO loss: a checkpoint, by default that with which RL began.

    It is computed with the same operators as the policy. Each rank holds all of its weights."""
    device = group.device(config.learner.device)
    operators = operators_for(config.numerics, getattr(torch, config.learner.dtype), device=device)
    where = checkpoint or run / "checkpoints" / "mid"
    temperature, weights = config.rl.temperature, config.learner.weights
    return Reference(where, temperature=temperature, operators=operators, weights=weights, device=device)


def computed_by(learner: TorchLearner) -> dict[str, str]:
    """Return the facts of software and hardware that determine a learner's results, besides the run's settings.

    They are versions, chip, vector instructions and threads. Where all are equal, results are equal bit for bit."""
    return {
        "parity class": learner.parity,
        "etude": __version__,
        "torch": str(torch.__version__),
        "chip": str(host_info()["cpu"]),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        PREFIXES: SHARED if learner.share_prefixes else "separate",
        **plugin_identities(learner.config),
    }


class LearnerProcess:
    """The methods that the run's main process calls in the learner process, or in one rank of it (`group`).

    Call `begin` first. All methods except `published` run in the torch thread."""

    def __init__(
        self, run: RunFolder, config: RunConfig, telemetry: Telemetry, *, group: ShardedProcessGroup | None = None
    ) -> None:
        self.run, self.config, self.telemetry, self.group = run, config, telemetry, group
        self._learner: TorchLearner | None = None
        self._channel: Channel | ShardedChannel | None = None
        self._batch: tuple[str, Batch | None] = "", None  # digest and batch of the next step, as recorded
        self._offered_at = 0.0

    @property
    def learner(self) -> TorchLearner:
        """The learner that `begin` created. Raises `RuntimeError` before that."""
        if self._learner is None:
            raise RuntimeError("the learner has no weights yet: call begin first")
        return self._learner

    @functools.cached_property
    def reference(self) -> Reference:
        """The reference policy of the KL term and of the DPO loss, loaded when first used."""
        return reference_policy(self.run, self.config, self.group or SINGLE_PROCESS)

    def refer(self, step: int) -> None:
        """From now on, use the version that the run published at `step` as the reference policy of `k1`."""
        with ScratchDirectory("reference") as folder:
            path = export_version(self.run, step, folder / "checkpoint", dtype="f32")
            self.reference = reference_policy(self.run, self.config, self.group or SINGLE_PROCESS, checkpoint=path)

    @functools.cached_property
    def hint_format(self) -> HintFormat:
        """The format in which this run writes hints as tokens."""
        return hint_format(self.run, self.config)

    def begin(self, checkpoint: str) -> int:
        """Create a learner, load a checkpoint into it, and return its step.

        If an earlier learner of this process is still publishing, wait for it first, since a store accepts only one
        writer."""
        if self._learner is not None:
            self._learner.close()
        store = weights_store(self.run)
        signer = read_signer(self.config.stores.signing_key) if self.group is None or self.group.rank == 0 else None
        self._channel = (
            Channel(store, signer=signer) if self.group is None else self.group.channel(store, signer=signer)
        )
        reference = self.reference if self.config.learner.has_reference else None
        self._learner = make_learner(self.config, self._channel, reference, group=self.group or SINGLE_PROCESS)
        self._learner.load(checkpoint)
        base = self._learner.trainable.base()
        if base is not None:  # for remote engines without a checkpoint
            store = weights_store(self.run)
            if self.group is None:
                publish_once(store, BASE_CHANNEL, base, signer=signer)
            else:
                self.group.channel(store, name=BASE_CHANNEL, signer=signer).publish_once(base)
        return self._learner.step

    def computed(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Return (facts of software and hardware as in `computed_by`, learner settings that differ from the config)."""
        configured, now = to_plain(self.config.learner), to_plain(self.learner.config)
        return computed_by(self.learner), {name: now[name] for name in now if now[name] != configured.get(name)}

    def record(self, plan: BatchPlan) -> BatchRef:
        """Make the batch of a planned step from the stored rollouts, and write it to the step's trace file.

        A step can be replayed from its trace. Call `forward_backward` next."""
        by, settings = self.computed()
        traces, read = traces_folder(self.run), rollout_files(self.run).read
        hints = any(member.hints for member in plan.members)
        batch, ref = record_batch(
            traces,
            plan,
            read,
            temperature=self.config.rl.temperature,
            computed_by=by,
            settings=settings,
            hint_format=self.hint_format if hints else None,
            each=progress.tick,
        )
        self._batch = ref.digest, batch
        return ref

    def forward_backward(self, step: int, digest: str) -> StepReport:
        """Accumulate the gradient on the recorded batch of `step`, and return the step's metrics.

        The rank that recorded the batch has it in memory; the others read it from the trace and compare it with
        `digest`. Raises `LedgerError` or `StoreError` (`RankLost` with several ranks) if that fails."""
        held, batch = self._batch
        self._batch = "", None
        if batch is None or held != digest:
            batch = self._read(step, digest)
        return self.learner.forward_backward(batch)

    def _read(self, step: int, digest: str) -> Batch:
        """Read a batch from the step's trace. Raises `LedgerError` or `StoreError`; in a group `RankLost` instead, so
        that the whole group restarts."""
        try:
            recorded = read_trace(trace_path(traces_folder(self.run), step))
            if recorded.digest != digest:
                facts = f"its digest is {recorded.digest[:12]}, expected {digest[:12]}"
                what = f"the trace of step {step} has another batch than was recorded"
                raise LedgerError(what, facts, hint=TRACES_HINT)
        except (LedgerError, StoreError) as error:
            if self.group is None:
                raise
            raise RankLost(error.what, error.facts, hint=error.hint) from error
        return recorded.batch

    def optim_step(self) -> Mapping[str, float]:
        """Apply the accumulated gradient, and return the metrics of the step by name."""
        return self.learner.optim_step()

    def offer(self, rollout_ids: tuple[str, ...]) -> None:
        """Start to publish the live weights. `rollout_ids` are the rollouts that this step trained on.

        The weights have been copied when this returns, so training may continue."""
        self._offered_at = time.perf_counter()
        self.learner.offer(rollout_ids)

    def published(self) -> Published:
        """Wait until the weights given to the last `offer` are published, and return their version.

        Runs in its own thread, so training may continue meanwhile."""
        channel, offered_at = self._channel, self._offered_at
        published = self.learner.published()
        wall_s = round(time.perf_counter() - offered_at, 4)
        facts = {name: getattr(published, name) for name in published.__struct_fields__}
        self.telemetry.event("weights.publish", **facts, step=published.version.step, wall_s=wall_s)
        if channel is not None and channel.repair_note:
            self.telemetry.event("weights.mend", step=published.version.step, reason=channel.repair_note)
            channel.repair_note = ""
        return published

    @property
    def publish_done(self) -> bool:
        """Whether no publish is in progress."""
        return self._learner is not None and not self._learner.is_publishing

    def finish_publish(self) -> None:
        """Wait until this rank has done its part of the last publish. If that failed, rank 0 raises the error."""
        with contextlib.suppress(EtudeError):
            if self.learner.is_publishing:
                self.learner.published()

    def probe(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of each token of a text but the first, under the learner's weights."""
        return self.learner.probe(token_ids)

    def parity(self) -> str:
        """Return the learner's parity class: processes of one class compute the same bits from the same weights."""
        return self.learner.parity

    def defend(self, defence: str) -> None:
        """Set how the learner corrects, from the next step on, for probabilities that differ from the engines'.

        `defence` is a value of the enumeration `parity.Defence`."""
        self.learner.defend(truncate=Defence(defence) is Defence.TRUNCATED)

    def k1(self, rollouts: list[RolloutSummary]) -> dict[str, float]:
        """Compute for each rollout, by id, the log-ratio of policy and starting checkpoint.

        It is Σ log π − log π_ref over the rollout's sampled tokens. Rollouts are read in pieces of `K1_TOKENS`
        tokens."""
        files, found = rollout_files(self.run), dict[str, float]()
        for some in group_by_budget([one.num_prompt + one.num_sampled for one in rollouts], K1_TOKENS):
            read = map(files.read, rollouts[some])
            found |= {one.rollout_id: 0.0 for one in rollouts[some]}  # it may have no token in the loss
            found |= self.reference.k1(reference_samples(read, temperature=self.config.rl.temperature))
        return found

    def save(self, path: str) -> None:
        """Save a checkpoint with weights and optimiser state to the directory `path`."""
        self.learner.save(path)


def call_on_all_ranks(
    leader: Leader, learning: LearnerProcess, work: Callable[..., object], *arguments: object
) -> object:
    """Call `work`, a method of `learning`, on every rank. Returns this rank's result."""
    learning.group = leader.join()
    if learning.publish_done:
        leader.broadcast("finish_publish")
    with leader.call(work.__name__, *arguments):
        return work(*arguments)


def exit_if_rank_lost(leader: Leader | None, work: Callable[..., object], *arguments: object) -> object:
    """Call `work` and return its result. If another rank is lost meanwhile, exit the process."""
    try:
        return work(*arguments)
    except RankLost as error:
        assert leader is not None, "only ranks raise this"
        leader.lost(error)


async def handlers(
    run: RunFolder, name: str, telemetry: Telemetry, ranks_at: str = "", ranks_away: str = "0"
) -> child.Handlers:
    """Return the RPC methods of a learner process, by name.

    `ranks_away` is how many of its ranks connect from other machines, to the address `ranks_at`."""
    torch.set_num_threads(NUM_THREADS)
    torch_thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
    waiting = ThreadPoolExecutor(1, thread_name_prefix="published")
    config = read_config(run)
    learning = LearnerProcess(run, config, telemetry)
    leader = None
    if config.learner.ranks > 1:
        from etude.loop.ranks import Leader

        leader = Leader(run, config, telemetry, at=ranks_at, away=int(ranks_away))

    def in_thread(thread: ThreadPoolExecutor, work: Callable[..., object]) -> Handler:
        async def call(*arguments: object) -> object:
            done = functools.partial(exit_if_rank_lost, leader, work, *arguments)
            return await asyncio.get_running_loop().run_in_executor(thread, done)

        return call

    in_torch_thread = functools.partial(in_thread, torch_thread)

    def with_all_ranks(work: Callable[..., object]) -> Handler:
        return in_torch_thread(work if leader is None else functools.partial(call_on_all_ranks, leader, learning, work))

    async def ready() -> bool:
        return True

    return {
        "ready": ((), ready),
        "begin": ((str,), with_all_ranks(learning.begin)),
        "record": ((BatchPlan,), in_torch_thread(learning.record)),
        "forward_backward": ((int, str), with_all_ranks(learning.forward_backward)),
        "optim_step": ((), with_all_ranks(learning.optim_step)),
        "offer": ((tuple[str, ...],), with_all_ranks(learning.offer)),
        "published": ((), in_thread(waiting, learning.published)),
        "probe": ((list[int],), with_all_ranks(learning.probe)),
        "parity": ((), in_torch_thread(learning.parity)),
        "defend": ((str,), with_all_ranks(learning.defend)),
        "refer": ((int,), with_all_ranks(learning.refer)),
        "k1": ((list[RolloutSummary],), in_torch_thread(learning.k1)),
        "save": ((str,), with_all_ranks(learning.save)),
    }


if __name__ == "__main__":
    child.main(handlers, "ranks-at", "ranks-away")
