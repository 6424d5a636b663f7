"""The interfaces of etude: the Protocols that implementations are written for. Imports no torch. The one function here,
`told`, streams a completion from any policy or engine.

Each Protocol has a fake in `etude.testing`, and a contract suite in `tests/contracts` that an implementation
joins in one line. Deadlines are in seconds; a method that waits names what it waited for in its error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Unpack, runtime_checkable

import msgspec

from etude.records.command import ExecOptions, ExecResult
from etude.records.completion import Completion, CompletionRequest, Version
from etude.records.image import Image
from etude.records.reward import Reward, Score
from etude.records.rollout import Graded, Invalid, Rollout
from etude.records.sample import Batch, Published, StepReport
from etude.records.task import Answer, Split, Task


@runtime_checkable
class TaskSource(Protocol):
    """The tasks to learn from. Random access by (split, index), so that one integer per split is enough to resume."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of tasks in the split; None when the source generates them without end."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Task `index` (from 0) of a split: the same for the same arguments, in any process. Raises `TaskError` past
        the end."""
        ...

    def answer(self, task: Task) -> Answer:
        """The hidden answer of a task. Called in grader processes only."""
        ...


@runtime_checkable
class Machine(Protocol):
    """An isolated, single-use machine. Paths are relative to its working directory."""

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command; others may run at the same time. A `key` never runs twice: a repeated call gets the recorded
        result.

        The command ends with its first process; processes that this left in the background live on. At the deadline
        everything that the command started is killed. `ExecOptions` has the options. Cancelling the caller does not
        stop the command: it runs to its end or its deadline, and a later call with the same key gets the result.

        Whatever the command does is a result: exit code 127 where it is not found, 126 where it cannot be run, 128 +
        signal where it was killed. Raises `MachineError` for failures that the command cannot have caused, `ValueError`
        for arguments that are no command."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """The content of a regular file; links are not followed. Raises `FileNotFoundError`, `IsADirectoryError`, or
        `ValueError` for a link, anything else that is not a file, and more than max_bytes."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and create its parent folders. Raises `ValueError` for a path that leaves the
        working directory, `OSError` where the machine's disk is full."""
        ...

    async def freeze(self) -> None:
        """Stop all processes of the machine for good; files can still be read and `snapshot` called. Idempotent."""
        ...

    async def snapshot(self) -> str:
        """Take a snapshot of the machine's state, and return its id; the machine goes on. Where
        `RuntimeInfo.forks_memory` is set the snapshot has the running processes too, all stopped at one moment; else it
        has the files alone. Raises `OSError` where nothing of the state is left, `ValueError` where it cannot be kept,
        and `MachineError`."""
        ...

    async def close(self) -> None:
        """Kill all processes of the machine and free its resources. Idempotent."""
        ...


class RuntimeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is, and what it can do on this host."""

    name: str  # "namespace", "microvm", "gvisor", "remote", "memory"
    isolation: str  # what stands between a machine and its host: "shared kernel", "own kernel", "none"
    users: tuple[str, ...]  # users that commands can run as; the first is the default of an image that names none
    images: bool = False  # whether machines can have a root filesystem other than the runtime's own
    forks_memory: bool = False  # whether a snapshot of a machine in use holds its running processes
    whole_snapshots: bool = True  # whether a snapshot of an image's machine holds more than its working directory
    notes: tuple[str, ...] = ()  # what is weaker on this host than it could be, and why: "no control groups: ..."


@runtime_checkable
class Runtime(Protocol):
    """Makes machines: `prepare` a snapshot, then `fork` machines from it."""

    @property
    def info(self) -> RuntimeInfo: ...

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Put files (path to content) into the working directory of an image (None: the runtime's own root filesystem).
        Returns the id of the snapshot, which follows from the content; a repeated call is cheap. Raises `ValueError`
        for files that cannot be a tree there, `MachineError` where the runtime cannot get the image."""
        ...

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """Make n identical machines in the snapshot's state: all of them, or none and `MachineError`. Raises
        `ValueError` for n < 1."""
        ...

    async def close(self) -> None:
        """Kill every machine. Idempotent."""
        ...


@runtime_checkable
class Portable(Protocol):
    """An optional part of a `Runtime`: snapshots can be sent to a runtime of the same kind in another process."""

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Write a snapshot as bytes, or as bytes that say where the other runtime finds it. Raises `ValueError` past
        max_bytes, `MachineError` for a snapshot that is not held here."""
        ...

    async def unpack(self, packed: bytes) -> str:
        """Read a snapshot from the bytes of `pack`; returns its id in this runtime. Raises `ValueError` for other
        bytes."""
        ...


@runtime_checkable
class Holding(Protocol):
    """An optional part of a `Runtime`: snapshots can be held, so that the runtime does not drop them."""

    def hold(self, snapshot: str) -> int:
        """Keep a snapshot until it was released as often as it was held. Returns its size in bytes. Raises
        `MachineError` for a snapshot that is not here."""
        ...

    def release(self, snapshot: str) -> None:
        """Undo one `hold`."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Grades exported files. Never runs in a process, or a fork of one, that has run the agent's code."""

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid: ...


@runtime_checkable
class RewardTerm(Protocol):
    """Measures one part of the reward of a finished rollout, beside the grader."""

    version: str  # another one wherever the same rollout could get another value: siblings are compared within one

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        """Measure a rollout from its task, trace, exports and times, and from what its grader found; it has no access
        to hidden answers. A value that cannot be known now, since a service is away, is None with the reason as
        evidence. What it raises ends the run, which can be resumed."""
        ...


@runtime_checkable
class CreditScheme(Protocol):
    """Turns the rewards of a group's judged siblings into advantages. Keeps no state."""

    name: str
    version: str

    def advantages(self, rewards: Sequence[Reward]) -> Sequence[float]:
        """One advantage per reward, in the same order. A rollout with advantage 0.0 is not trained on. The order of the
        siblings does not matter; equal rewards have equal advantages."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Asks a model for completions. Rollouts, evaluations and the gateway all use this one call."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Have an engine answer a request. Raises `EngineError` when the request made no progress for its `deadline_s`,
        or no engine can serve it; `EngineBehind` when no engine reached its `min_step` in the time that it may wait."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An optional part of a `Policy` or an `Engine`: returns tokens while it samples them."""

    def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Yield the token ids sampled since the last part, and at the end the whole `Completion` of the same tokens.
        Raises what `complete` or `generate` raises. Closing the generator early cancels the request."""
        ...


async def told(
    source: object, whole: Callable[[CompletionRequest], Awaitable[Completion]], request: CompletionRequest
) -> AsyncGenerator[list[int] | Completion]:
    """Stream a completion from a policy or an engine, as `Streaming.stream` does. From one that cannot stream, get it
    in one piece by its method `whole`."""
    if isinstance(source, Streaming):
        async with aclosing(source.stream(request)) as parts:
            async for part in parts:
                yield part
    else:
        completion = await whole(request)
        yield completion.token_ids.tolist()
        yield completion


@runtime_checkable
class BlobStore(Protocol):
    """Immutable objects under keys, and pointers that move by compare-and-swap. Keys are relative posix paths."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object; it is durable when this returns. Nothing happens where the key has the same bytes already.
        Raises `StoreError` where it has others."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes [start, stop) of an object or a pointer. Raises `KeyError` when it does not exist."""
        ...

    def list(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix, sorted. Raises `StoreError` for a prefix that no key can have."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. Nothing happens where it does not exist."""
        ...

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they are `expected` (None: the pointer is absent). False where they
        are others."""
        ...


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State and load of an engine at this moment."""

    name: str
    version: Version | None  # None: no weights yet
    paused: bool
    context_tokens: int  # longest context
    max_sequences: int  # decoded together
    num_running: int
    num_waiting: int
    kv_tokens_free: int
    capabilities: tuple[str, ...]  # "routes", "spans", "stream", "pause-keep", "adopt", "verify", "exact"
    parity: str = ""  # parity class: processes of one class compute the same bits from the same weights; "": unknown
    trouble: str = ""  # why the latest adoption failed; "" when it did not fail, or is under way


@runtime_checkable
class Engine(Protocol):
    """One inference server, reached by its URL."""

    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample a completion. An engine that shares prefixes among its sessions anyway may ignore `fork_from`, which
        saves work and changes no result. Raises `EngineBehind` (HTTP 409), `ContextFull` (413), `EngineError` for
        anything else that is not the caller's fault."""
        ...

    async def pause(self) -> None:
        """Stop decoding between two tokens. Requests in flight keep their KV cache and wait for `resume`."""
        ...

    async def resume(self) -> None: ...

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        """Wait until the engine holds step `min_step` or a later version, which it fetches by itself; returns that
        version. Raises `EngineError` at the deadline."""
        ...

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo: ...

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        """Score a fixed text: the version in live memory, and the log-probabilities of its tokens (len(token_ids) - 1
        numbers). An update is proven only when these agree with the learner's."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Holds the weights, trains them and publishes them."""

    def forward_backward(self, batch: Batch) -> StepReport:
        """Accumulate the gradient of the batch's loss. Raises `ParityError` where the ratio must be 1 and is not."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Apply and clear the gradient, and count the step up by one. Returns "grad_norm" and "lr"."""
        ...

    def save(self, path: str) -> None:
        """Write a checkpoint directory that `load` and Hugging Face's transformers read. It appears whole or not at
        all."""
        ...

    def load(self, path: str) -> None: ...

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        """Publish the weights: write their bytes, then the manifest, which lists the rollouts, then move the pointer.
        The version counts as published once the pointer has moved."""
        ...


@runtime_checkable
class ExperienceStore(Protocol):
    """The durable record of every rollout: its state in the ledger, and its data."""

    def move(self, rollout_id: str, to: str, *, reason: str = "", **facts: Any) -> None:
        """Move a rollout to another state. Raises `LedgerError` when the table of transitions forbids it."""
        ...

    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Store data of a rollout under a name; durable when this returns. Call it before the transition that needs the
        data."""
        ...

    def get(self, rollout_id: str, name: str) -> bytes | None: ...

    def states(self) -> dict[str, int]:
        """Number of rollouts by state."""
        ...

    def transaction(self, work: Callable[[], None]) -> None:
        """Run `work` as one transaction: all of its moves and puts happen, or none."""
        ...


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a run to its trackers."""

    name: str  # the folder's name
    run_id: str  # unique, and the same when the run is resumed
    folder: str  # the run folder
    resumed: bool  # whether an earlier session has logged metrics of this run
    config: Mapping[str, Any]  # the effective settings, as nested plain data, without secrets
    facts: Mapping[str, Any]  # versions and the host: `run.json`


@runtime_checkable
class Tracker(Protocol):
    """Receives a run's metrics, for example to send them to TensorBoard or W&B. A plug-in of kind "tracker" is one.

    It runs in its own process, whose main thread makes all calls, in order. What it raises is reported and never ends
    the run; after `start` has raised, nothing else is called. A `TrackerWarning` is shown to the user, too.
    """

    def start(self, run: TrackedRun) -> None:
        """Called once, first."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, by names such as "rl/loss". Values may be NaN or infinite. Steps count from 0
        or 1 within the part before the slash; a step that is trained again after a restart is logged again."""
        ...

    def finish(self, outcome: str) -> None:
        """Called last: "finished", "stopped" or "failed". Write whatever is buffered: the process is ended without its
        exit handlers, and killed after 30 s."""
        ...
