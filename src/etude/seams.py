"""Every seam of etude: the Protocols that an implementation can stand behind. No torch; of implementation only what all
would write alike: `told`, which makes one of `Streaming` of what may be one.

Each has at most six methods, a fake in `etude.testing`, and a contract suite in `tests/contracts` that an
implementation joins in one line. Deadlines are in seconds; each method that waits says what for in its error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Unpack, runtime_checkable

import msgspec

from etude.records.command import ExecOptions, ExecResult
from etude.records.completion import Completion, CompletionRequest, Version
from etude.records.image import Image
from etude.records.rollout import Graded, Invalid
from etude.records.sample import Batch, Published, StepReport
from etude.records.task import Answer, Split, Task


@runtime_checkable
class TaskSource(Protocol):
    """What to learn. Random access by (split, index), so a cursor is one integer per split and always resumable."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of tasks in the split; None when they are generated without end."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """The same task for the same arguments, in any process. Raises `TaskError` past the end."""
        ...

    def answer(self, task: Task) -> Answer:
        """The hidden side. Called in grader processes only."""
        ...


@runtime_checkable
class Machine(Protocol):
    """An isolated, single-use machine. Paths are relative to its working directory."""

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command, beside others that run. The same `key` never runs twice: whoever repeats it gets the record.

        It ends with its first process; what that left in the background lives on. At the deadline everything it ever
        started is dead. What it may be given is in `ExecOptions`. Cancelling the caller does not stop the command: it
        runs to its end or its deadline, and whoever asks with the same key gets the record.

        Whatever the command does is a result: not found is 127, not runnable 126, killed 128 + signal. `MachineError`
        is for what it could not have caused; `ValueError` for a command that cannot be one."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """A regular file's content, no link followed. `FileNotFoundError`, `IsADirectoryError`, or `ValueError` for a
        link, something that is not a file, and past max_bytes."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, parents included. `ValueError` for a path that leaves the working directory;
        `OSError` where the machine's disk is full."""
        ...

    async def freeze(self) -> None:
        """Stop everything in it for good; files can still be read, and `snapshot` taken. Idempotent."""
        ...

    async def snapshot(self) -> str:
        """Its state as a new snapshot, whose id is returned; the machine goes on. `RuntimeInfo.forks_memory` says
        whether the state is the files alone or the running processes as well, all of them stopped at one moment.
        `OSError` where nothing is left of it, `ValueError` where that cannot be kept, `MachineError`."""
        ...

    async def close(self) -> None:
        """Kill everything in it and free what it held. Idempotent."""
        ...


class RuntimeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is and can do here."""

    name: str  # "namespace", "microvm", "gvisor", "remote", "memory"
    isolation: str  # what stands between a machine and its host: "shared kernel", "own kernel", "none"
    users: tuple[str, ...]  # whom commands can run as; the first is the default of an image that names none
    images: bool = False  # whether machines can have a root filesystem other than the runtime's own
    forks_memory: bool = False  # whether a snapshot of a machine in use holds its running processes
    whole_snapshots: bool = True  # whether a snapshot of an image's machine holds more than its working directory
    notes: tuple[str, ...] = ()  # what is weaker here than it could be, and why: "no control groups: memory ..."


@runtime_checkable
class Runtime(Protocol):
    """Where machines come from."""

    @property
    def info(self) -> RuntimeInfo: ...

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Prepare these files in the working directory of an image (None: the runtime's own root filesystem); returns
        a snapshot id, content-addressed. Cheap when known. `ValueError` for files that cannot be a tree there,
        `MachineError` where images cannot be had."""
        ...

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """n identical machines in the snapshot's state; all of them or none. `MachineError`; `ValueError` for n < 1."""
        ...

    async def close(self) -> None:
        """Kill every machine. Idempotent."""
        ...


@runtime_checkable
class Portable(Protocol):
    """What a runtime may be beside: one whose snapshots go to another runtime of its kind, in another process."""

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """The snapshot as bytes, or bytes that say where the other finds it. `ValueError` past max_bytes,
        `MachineError` for one that is not held here."""
        ...

    async def unpack(self, packed: bytes) -> str:
        """The id, here, of the snapshot that `pack` gave there. `ValueError` for bytes that are none."""
        ...


@runtime_checkable
class Holding(Protocol):
    """What a runtime may be beside: one that can be told which snapshots it must not let go of."""

    def hold(self, snapshot: str) -> int:
        """Keep it, whatever else is asked to be kept, until it was released as often; how many bytes it takes.
        `MachineError` for one that is not held here."""
        ...

    def release(self, snapshot: str) -> None:
        """One hold fewer."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Judges exported files; never runs in, or is forked into, a process the agent's code is in."""

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid: ...


@runtime_checkable
class Policy(Protocol):
    """The one call through which everything asks a model: rollouts, evaluations, the gateway."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Raises `EngineError` when nothing happened with it for the request's `deadline_s`, or no engine can serve it;
        `EngineBehind` when none came up to its version in all the time that it waits for one."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """What a policy or an engine may be beside: one that tells tokens while it samples them."""

    def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """The ids that were sampled since the last part, part after part; at the end the `Completion`, whose tokens
        they are. Raises what `complete` or `generate` raises; closed early, the request is cancelled."""
        ...


async def told(
    source: object, whole: Callable[[CompletionRequest], Awaitable[Completion]], request: CompletionRequest
) -> AsyncGenerator[list[int] | Completion]:
    """What a policy or an engine tells of a completion, as `Streaming` does; at once from one that cannot stream, by
    `whole`, its method that answers in one piece."""
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
        """Durable when it returns. The same key with the same bytes is a no-op; with others, `StoreError`."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop). `KeyError` when there is no such object."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Sorted keys under a prefix. Raises `StoreError` for a prefix that no key can begin with."""
        ...

    def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they are `expected` (None: absent). False: somebody else won."""
        ...


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and does at this moment."""

    name: str
    version: Version | None  # None: no weights yet
    paused: bool
    context_tokens: int  # longest context
    max_sequences: int  # decoded together
    num_running: int
    num_waiting: int
    kv_tokens_free: int
    capabilities: tuple[str, ...]  # "routes", "spans", "stream", "pause-keep", "adopt", "verify", "exact"
    parity: str = ""  # parity class: who has the same one computes the same bits of the same weights; "": unknown
    trouble: str = ""  # why the latest adoption failed; "" when it did not, or is under way


@runtime_checkable
class Engine(Protocol):
    """One inference server, reached by its URL."""

    async def generate(self, request: CompletionRequest) -> Completion:
        """`EngineBehind` (409), `ContextFull` (413), `EngineError` for anything else that is not the caller's."""
        ...

    async def pause(self) -> None:
        """Stop decoding between two tokens; requests in flight keep their KV and wait."""
        ...

    async def resume(self) -> None: ...

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        """Be at version step `min_step` or later by the deadline: the engine pulls the bytes itself."""
        ...

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo: ...

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        """The probe: the version in the live memory and the log-probabilities it gives a fixed text's tokens
        (len(token_ids) - 1 of them). An update that answers 200 has proven nothing until this agrees."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Holds the weights and changes them."""

    def forward_backward(self, batch: Batch) -> StepReport:
        """Accumulate the gradient of the batch's loss. Raises `ParityError` where the ratio must be 1 and is not."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Apply and clear the gradient; the step counts up by one. Returns grad_norm, lr."""
        ...

    def save(self, path: str) -> None:
        """A checkpoint directory that `load` and Hugging Face read; complete or absent, never half."""
        ...

    def load(self, path: str) -> None: ...

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        """Bytes, then manifest (it lists the rollouts), then pointer: that is the commit."""
        ...


@runtime_checkable
class ExperienceStore(Protocol):
    """The durable record of every rollout: the ledger and what was produced."""

    def move(self, rollout_id: str, to: str, *, reason: str = "", **facts: Any) -> None:
        """One transition; `LedgerError` when the table forbids it."""
        ...

    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Keep what belongs to a rollout, durably, before the transition that relies on it."""
        ...

    def get(self, rollout_id: str, name: str) -> bytes | None: ...

    def states(self) -> dict[str, int]:
        """Number of rollouts by state."""
        ...

    def transaction(self, work: Callable[[], None]) -> None:
        """All of `work`'s moves and puts, or none."""
        ...


class Sink(Protocol):
    """Where metrics also go: TensorBoard, W&B."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
