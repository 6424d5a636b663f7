"""Starts and controls the tensor-parallel ranks of an engine: the processes that together compute its model.

Rank 0 is the engine's process. It schedules, samples and serves, and has the first part of the model. Every other rank
(`rank_process`) has another part of each layer, and of its keys and values. Rank 0 sends them each forward pass, then
computes its own part; the sums of a layer are collectives (`numerics.parallel`). So all ranks make the same passes in
the same order. A new version is written on all ranks between the same two passes. If one fails, all restore the old
version; if that fails, the engine ends.

If a rank ends or hangs, rank 0 raises `RankLost`, with which the engine ends. The ranks end with rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from etude.errors import ConfigError, EtudeError, WeightsError
from etude.inference.config import EngineConfig
from etude.inference.rank_messages import (
    Apply,
    Call,
    Commit,
    Compare,
    Link,
    Prepare,
    RankJob,
    Reply,
    Score,
    Step,
    Undo,
    WeightsCall,
)
from etude.inference.scheduler import Chunk, Draft, Plan
from etude.models import Transformer, hf_views
from etude.models.checkpoint import load_model
from etude.numerics.config import Mode
from etude.numerics.device import device_for
from etude.numerics.factory import operators_for
from etude.numerics.parallel import SINGLE_RANK, Parallel, RankLost
from etude.records.adapter import adapted_modules
from etude.scratch import ScratchDirectory
from etude.weights import FollowerProcess, Tensor, Update
from etude.weights.follow.engine_maps import sharded
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Known, Probe, Swap, Target

T = TypeVar("T")
LOAD_S = 600.0  # for a rank to start, or to load or prepare weights; on a busy host `import torch` alone takes minutes
END_S = 10.0
LATE_S = 1.0  # a rank that ended closes its connections a little before its parent can see its exit code
HINT = "restart the engine; the end of its log has the output of all ranks"


class Ranks:
    """Starts the other ranks of an engine, and sends them calls. `parallel` is rank 0's place among them.

    Create it in the main thread: the kernel kills the ranks when the thread that started them ends. `job`: that of
    rank 0. `close`, or the end of a `with` block, kills the ranks. Only the engine's thread may call `step`, `score`
    and a swap's `apply` and `undo`; only one other thread `prepare`, `compare` and `commit`. After a call raised
    `RankLost`, so do `check` and all calls with replies. Creation raises `RankLost`, `ConfigError` (`rank_device`) and
    torch's error if ranks cannot connect."""

    def __init__(self, job: RankJob, *, name: str = "engine") -> None:
        self.name, self._deadline_s = name, deadline_s(job.config)
        self._lost: RankLost | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._steps: list[Link] = []
        self._weights: list[Link] = []
        self._opened = contextlib.ExitStack()
        folder = self._opened.enter_context(ScratchDirectory("engine-ranks"))
        job = dataclasses.replace(job, meeting=folder / "meeting")
        try:
            for rank in range(1, job.config.tensor_parallel):
                self._start(dataclasses.replace(job, rank=rank))
            self._replies(self._weights)  # they have started, and will meet
            self.parallel = meet(job)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, job: RankJob) -> None:
        (step, step_end), (weights, weights_end) = socket.socketpair(), socket.socketpair()
        with step_end, weights_end:
            fds = [step_end.fileno(), weights_end.fileno()]
            argv = [sys.executable, "-m", "etude.inference.rank_process", *map(str, fds)]
            self._processes.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds))
        self._opened.callback(_end, self._processes[-1])
        self._steps.append(self._opened.enter_context(Link(step, self._deadline_s)))
        self._weights.append(self._opened.enter_context(Link(weights, LOAD_S)))
        self._steps[-1].send_bytes(pickle.dumps(job))

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2 and so on."""
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> None:
        """Wait until every rank has loaded its part of the model. Raises the error of the first that could not."""
        self._replies(self._weights)

    def close(self) -> None:
        """Kill the ranks with SIGKILL, and wait for them (up to 10 s each). Further calls do nothing."""
        self._opened.close()

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended, or did not reply in time."""
        if self._lost is not None:
            raise self._lost
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                raise RankLost(f"rank {rank} of {self.name} ended", f"its exit code is {code}", hint=HINT)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context manager for rank 0's part of a pass.

        If the block raises `RankLost`, it raises an error that names the rank that ended, if there is one."""
        try:
            yield
        except RankLost:
            self._check_soon()
            raise

    def _check_soon(self) -> None:
        end = time.monotonic() + LATE_S
        while time.monotonic() < end:
            self.check()
            time.sleep(0.02)

    def step(self, plan: Plan) -> None:
        """Send a plan's forward pass to the other ranks, and return at once: the caller then computes its own part.

        Raises `RankLost`."""
        self._send(self._steps, forward_pass(plan))

    def score(self, token_ids: Sequence[int]) -> None:
        """Send a forward pass over these token ids, without the KV cache, and return at once.

        The caller then computes its own part. Raises `RankLost`."""
        self._send(self._steps, Score(list(token_ids)))

    def between_passes(self, call: Call, own: Callable[[], T]) -> T:
        """Have the other ranks make a call between two forward passes, while this one calls `own`. Returns its result.

        Raises the error of `own`, else that of the first rank that failed, and `RankLost`."""
        return self._together(self._steps, call, own)[0]

    def beside_passes(self, call: WeightsCall, own: Callable[[], T], *fds: int) -> tuple[T, list[Reply]]:
        """Have the other ranks make a call while forward passes go on, and call `own` meanwhile.

        Returns its result and the replies by rank. `fds`: file descriptors sent with the call. Raises as
        `between_passes` does."""
        return self._together(self._weights, call, own, *fds)

    def _together(self, links: list[Link], call: object, own: Callable[[], T], *fds: int) -> tuple[T, list[Reply]]:
        self.check()
        self._send(links, call, *fds)
        try:
            result = own()
        except BaseException:
            with contextlib.suppress(EtudeError):
                self._replies(links)  # so that none is left for the next call
            raise
        return result, self._replies(links)

    def _send(self, links: list[Link], call: object, *fds: int) -> None:
        for rank, link in enumerate(links, 1):
            with self._answers(rank, link):
                link.send(call, *fds)

    def _replies(self, links: list[Link]) -> list[Reply]:
        """Receive a reply of each rank. Raises the first error, after all have replied."""
        replies = []
        for rank, link in enumerate(links, 1):
            with self._answers(rank, link):
                replies.append(link.receive(Reply)[0])
        for rank, reply in enumerate(replies, 1):
            if reply.error is not None:
                what, facts, hint = reply.error
                raise WeightsError(f"rank {rank} of {self.name}: {what}", facts, hint=hint)
        return replies

    @contextlib.contextmanager
    def _answers(self, rank: int, link: Link) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self._check_soon()
            late = isinstance(error, TimeoutError)
            facts = f"no reply within {link.deadline_s:g} s" if late else "its connection was closed"
            self._lost = RankLost(f"rank {rank} of {self.name} does not answer", facts, hint=HINT)
            raise self._lost from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(END_S)


def start_ranks(job: RankJob, name: str) -> contextlib.AbstractContextManager[Ranks | None]:
    """Start the other ranks of an engine.

    Returns a context manager that yields them, or yields None if the engine has one rank. Raises as `Ranks` does."""
    return Ranks(job, name=name) if job.config.tensor_parallel > 1 else contextlib.nullcontext()


def deadline_s(config: EngineConfig) -> float:
    """Return the deadline in seconds of each collective, and of each call between forward passes: half of `stall_s`.

    So requests get an error before the engine itself counts as hung. Loading, and calls beside the passes, have
    `LOAD_S`."""
    return config.stall_s / 2


def forward_pass(plan: Plan) -> Step:
    """Return a plan as what other ranks need of it."""
    parts: list[Chunk | Draft] = [*plan.chunks, *plan.drafts]
    token_ids = [s.token_ids[-1] for s in plan.decode]
    for part in parts:
        token_ids += map(int, part.token_ids)
    return Step(
        copies=[(copy.source, copy.target, copy.stop) for copy in plan.copies],
        slots=[s.row for s in plan.decode],
        positions=[s.num_computed for s in plan.decode],
        spans=[(part.sequence.row, part.start, part.stop) for part in parts],
        token_ids=token_ids,
    )


def meet(job: RankJob) -> Parallel:
    """Join the process group of the engine's ranks. Blocks until all have joined, and returns this rank's place.

    NCCL on GPUs, gloo on CPUs. The group is a new one: a process has one default group, and may have several
    engines."""
    size = job.config.tensor_parallel
    store = c10d.FileStore(str(job.meeting), size)
    if rank_device(job).type == "cuda":
        backend: c10d.Backend = c10d.ProcessGroupNCCL(store, job.rank, size, c10d.ProcessGroupNCCL.Options())
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine; its name may not resolve
        backend = c10d.ProcessGroupGloo(store, job.rank, size, timedelta(seconds=LOAD_S))
    group = cast(ProcessGroup, backend)  # it has the same collectives
    return Parallel(size, job.rank, group=group, deadline_s=deadline_s(job.config))


def rank_device(job: RankJob) -> torch.device:
    """Return the device of a rank: the CPU, or GPU n + rank, where n is the GPU that `device` names ("cuda": 0).

    Raises `ConfigError` if there is no such GPU, and in exact mode with several ranks on GPUs."""
    first = device_for(job.config.device)
    if first.type == "cpu":
        return first
    if job.numerics.mode is Mode.EXACT and job.config.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel = {job.config.tensor_parallel} is not possible in exact mode on {first}",
            "exact sums over ranks need CPUs",
            hint="set numerics.mode = 'native', or engine.device = 'cpu'",
        )
    return device_for(f"cuda:{(first.index or 0) + job.rank}")


def load_part(job: RankJob, parallel: Parallel = SINGLE_RANK) -> Transformer:
    """Load the part of the model that a rank computes, or all of it. Without a checkpoint the weights mean nothing."""
    dtype, device = getattr(torch, job.config.dtype), rank_device(job)
    operators = operators_for(job.numerics, dtype, rounds_weights=False, device=device)
    if job.checkpoint is not None:
        return load_model(job.checkpoint, dtype=dtype, operators=operators, device=device, parallel=parallel)
    assert job.model is not None, "a rank has a checkpoint or sizes"
    seed = 0 if parallel.degree == 1 else None
    return Transformer(job.model, seed=seed, dtype=dtype, operators=operators, parallel=parallel).to(device)


def part_target(model: Transformer, tensors: Known) -> Target:
    """Return the live weights of a rank, to which its part of each version is written. `tensors`: a version."""
    specs = {name: tensor.spec if isinstance(tensor, Tensor) else tensor for name, tensor in tensors.items()}
    parallel = model.parallel
    return Target(Map(sharded(named(hf_views(model)), specs, rank=parallel.rank, size=parallel.degree)))


class RankedTarget:
    """Writes versions to the live weights of all ranks of an engine; `WeightSync` uses it like a `Target`.

    `model`: rank 0's part. `chain`: gives the versions; all ranks map its image in shared memory, so each version is
    fetched, checked and stored once. `tensors`: the first version. Raises `WeightsError` for an adapter, and for
    tensors that do not fit."""

    def __init__(self, model: Transformer, ranks: Ranks, chain: FollowerProcess, tensors: Mapping[str, Tensor]) -> None:
        if adapted_modules(tensors):
            raise WeightsError(
                f"{ranks.name} cannot load the published adapter",
                "it has several ranks, and an adapter is merged into complete weights",
                hint="set engine.tensor_parallel = 1, or learner.lora_rank = 0",
            )
        self._own, self._ranks, self._chain = part_target(model, tensors), ranks, chain

    def prepare(self, update: Update, tensors: Mapping[str, Tensor], *, undoable: bool = True) -> Swap:
        """Prepare the chain's version on all ranks. Raises `WeightsError`; then nothing was written on any."""
        assert self._chain.image is not None, "the chain has a version"
        fd, table_at = self._chain.image
        own = partial(self._own.prepare, update, tensors, undoable=undoable)
        swap, _ = self._ranks.beside_passes(Prepare(table_at, not undoable), own, fd)
        return RankedSwap(update.version, undoable=undoable, own=swap, ranks=self._ranks)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that differ from those of the version that was prepared, on any rank."""
        names, replies = self._ranks.beside_passes(Compare(), partial(self._own.differing, tensors))
        return sorted({*names, *(name for reply in replies for name in reply.names)})


@dataclass
class RankedSwap(Swap):
    """A version that is ready to be written on all ranks. `own`: rank 0's part."""

    own: Swap = field(kw_only=True)
    ranks: Ranks = field(kw_only=True)

    def apply(self, probe: Probe | None = None) -> None:
        """Write the version on all ranks. If it fails on one, it is undone on all, and `WeightsError` is raised.

        If it cannot be undone on all, `applied` stays True: the ranks then have different versions."""
        self.applied = True
        try:
            self.ranks.between_passes(Apply(), partial(self.own.apply, probe))
        except EtudeError as error:
            hint = "the engine ends, since its ranks have different versions"
            if self.undoable:
                with contextlib.suppress(EtudeError):
                    self.undo()
                    hint = "the old weights were restored on all ranks; the engine tries again"
            raise WeightsError(f"{self.version} was not adopted", f"{error.what}: {error.facts}", hint=hint) from error

    def undo(self) -> None:
        """Restore the old weights on every rank that wrote the new ones.

        Raises `WeightsError` if a rank cannot, and `RankLost`."""

        def own() -> None:
            if self.own.applied:
                self.own.undo()

        self.ranks.between_passes(Undo(), own)
        self.applied = False

    def commit(self) -> None:
        """Free the memory that was kept for `undo`, on all ranks. It cannot be undone afterwards.

        Raises `WeightsError` and `RankLost`."""
        self.ranks.beside_passes(Commit(), self.own.commit)
        self.undoable = False
