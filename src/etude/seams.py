"""The interfaces of etude: the Protocols that implementations and plug-ins are written for. Imports no torch.

`etude.testing` has in-memory implementations. `tests/contracts` and `etude.testing.contracts` have the tests that every
implementation must pass. Rules for all of them:

- Deadlines and durations are in seconds. The error of a wait that reached its deadline names what it waited for.
- Expected failures are raised as the subclass of `etude.errors.EtudeError` that the docstring names.
- Coroutines of one object may run at the same time in one event loop. Other methods are called from one thread at a
  time unless the docstring says more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import msgspec

from etude.records.command import ExecOptions, ExecResult
from etude.records.completion import Completion, CompletionRequest, Version
from etude.records.image import Image
from etude.records.reward import Reward, Score
from etude.records.rollout import Graded, Invalid, Rollout
from etude.records.sample import Batch, Published, StepReport
from etude.records.served import ServedAnswer
from etude.records.summary import TurnPlace
from etude.records.task import Answer, Split, Task


@runtime_checkable
class TaskSource(Protocol):
    """A source of tasks to learn from. `name` is the name of the source.

    A task is identified by its split and index, so a run resumes from one integer per split. Several processes open the
    same source, and each must get the same tasks. A method may take up to 60 s."""

    name: str  # written into `Task.source`

    def size(self, split: Split) -> int | None:
        """Return the number of tasks in a split; None when the source generates tasks without end."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Return task `index` (from 0) of a split. The same arguments give the same task in every process.

        Raises `TaskError` when `index` is not below the size."""
        ...

    def answer(self, task: Task) -> Answer:
        """Return the hidden answer of a task, by which it is graded. Only grader processes call this."""
        ...


@runtime_checkable
class WithdrawingSource(TaskSource, Protocol):
    """An optional interface of a `TaskSource` with people's data, who may withdraw their consent.

    `task` and `answer` raise `TaskWithdrawn` for what was withdrawn; its rollouts are then invalid."""

    def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        """Return the ids of those tasks (`Task.task_id`) that may not be trained on now.

        A run asks when it forms a batch, and again before it publishes the weights that were trained on it."""
        ...


@runtime_checkable
class Machine(Protocol):
    """An isolated machine (a sandbox) for one rollout or one grade. Paths are relative to its working directory.

    Coroutines may run at the same time. After `close` every method except `close` raises `MachineError`. Raise
    `MachineError` only for failures that code inside the machine cannot have caused. The error makes a rollout invalid,
    and an agent must not be able to do that on purpose."""

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command and return its exit code and output.

        `key` is an idempotency key: a second call with the same key does not run the command again and returns the
        recorded result. `options` are the fields of `ExecOptions`, such as `stdin`, `cwd`, `env` and `user`.

        The command ends when its first process ends; background processes that it started continue. At the deadline
        everything that the command started is killed, and `ExecResult.timed_out` is True. Cancelling the caller does
        not stop the command: it runs to its end or its deadline, and a later call with the same key gets the result.

        A failing command is a result, not an error: exit code 127 when the program is not found, 126 when it cannot be
        executed, 128 + signal when it was killed. Raises `ValueError` for invalid arguments, and `MachineError` when
        the machine failed, is frozen or is closed."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """Return the content of a regular file. Symbolic links are not followed.

        Raises `FileNotFoundError` for a missing file, `IsADirectoryError` for a folder, and `ValueError` for a link,
        for anything else that is not a regular file, for a file of more than `max_bytes`, and for a path outside the
        working directory."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file; missing parent folders are created.

        Raises `ValueError` for a path outside the working directory, and `OSError` when the machine's disk is full."""
        ...

    async def freeze(self) -> None:
        """Stop all processes of the machine for good. Idempotent.

        `read` and `snapshot` still work; `exec` raises `MachineError`."""
        ...

    async def snapshot(self) -> str:
        """Save the machine's state and return the snapshot's id, for `Runtime.fork`. The machine continues.

        When `RuntimeInfo.forks_memory` is set, the snapshot has the running processes too, all stopped at the same
        moment; otherwise it has the files only. Raises `OSError` when the state is gone, `ValueError` when it cannot
        be saved, and `MachineError`."""
        ...

    async def close(self) -> None:
        """Kill all processes of the machine and free its resources. Idempotent."""
        ...


class RuntimeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of a kind of machines on this host; a `Runtime` returns it.

    - `name`: "namespace", "microvm", "gvisor", "remote" or "memory".
    - `isolation`: what separates a machine from its host: "shared kernel", "own kernel" or "none".
    - `users`: the users that commands can run as; the first is the default of an image that names none.
    - `images`: whether a machine can have a root filesystem other than the runtime's own.
    - `forks_memory`: whether a snapshot also has the running processes of the machine.
    - `whole_snapshots`: whether a snapshot of a machine with an image has all its files, not only the working
      directory.
    - `notes`: sentences about limits and isolation that are weaker on this host than on others, with the reasons."""

    name: str
    isolation: str
    users: tuple[str, ...]
    images: bool = False
    forks_memory: bool = False
    whole_snapshots: bool = True
    notes: tuple[str, ...] = ()


@runtime_checkable
class Runtime(Protocol):
    """Makes machines of one kind: `prepare` creates a snapshot, and `fork` creates machines from it."""

    @property
    def info(self) -> RuntimeInfo:
        """The runtime's name and capabilities; constant while the runtime is open."""
        ...

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Create a snapshot, a filesystem with `files` (path → content) in its working directory, and return its id.

        The root filesystem comes from `image`; None: from the runtime. The id is derived from the content, and a
        repeated call with the same content is cheap. Raises `ValueError` for paths that cannot be files there, and
        `MachineError` when the runtime cannot get the image."""
        ...

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """Create `n` machines in the state of a snapshot: an id from `prepare` or `Machine.snapshot`.

        Either all `n` are returned, or `MachineError` is raised and none is left. Raises `MachineError` for an unknown
        snapshot and at the deadline, and `ValueError` for n < 1."""
        ...

    async def close(self) -> None:
        """Kill all machines of this runtime and free its resources. Idempotent."""
        ...


@runtime_checkable
class Portable(Protocol):
    """An optional interface of a `Runtime` whose snapshots can be sent to a runtime of the same kind in another
    process."""

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Serialise a snapshot for a runtime in another process. The bytes are its content, or a reference to it.

        Raises `ValueError` when the result would exceed `max_bytes`, and `MachineError` for a snapshot that this
        runtime does not have."""
        ...

    async def unpack(self, packed: bytes) -> str:
        """Load a snapshot from bytes that `pack` returned, and return its id in this runtime.

        Raises `ValueError` for other bytes."""
        ...


@runtime_checkable
class Holding(Protocol):
    """An optional interface of a `Runtime` that deletes unused snapshots. `hold` and `release` count references.

    A snapshot with a reference is not deleted."""

    def hold(self, snapshot: str) -> int:
        """Add a reference to a snapshot, and return the snapshot's size in bytes. It is kept while it has references.

        Raises `MachineError` for a snapshot that this runtime does not have."""
        ...

    def release(self, snapshot: str) -> None:
        """Remove one reference that `hold` added."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Grades the files that a rollout exported. It never runs in a process (or its fork) that has run agent code."""

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        """Grade one rollout. `exports`: path → content of the files that the task declares, as the agent left them.

        Returns `Graded` for everything that the agent can cause, such as missing or broken files. Returns `Invalid`,
        with the evidence, only for a failure that the agent cannot cause. Several grades may run at the same time."""
        ...


@runtime_checkable
class RewardTerm(Protocol):
    """Measures one part of the reward of a finished rollout, besides the grade. A plug-in of kind "reward" is one.

    `version` is stored with every value; change it when the meaning of the value changes. A class whose scores may have
    hints has the attribute ``gives_hints = True``; without it, a config with `hints` for the term is refused."""

    version: str  # change it when the same rollout could get another value: siblings are compared within one version

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        """Measure one graded rollout. The term sees its task, messages, files, times and grade, but no hidden answer.

        The value must be finite. A `Score` may also give parts of the value to single turns, and hints (texts that
        would have helped) to faulty turns. When the value cannot be known, return a `Score` with value None and the
        reason as evidence; with `retry=True` if it may be known later, for example because a service is down: then it
        is measured again. Several rollouts may be scored at the same time. An exception ends the run with a
        `PluginError` that names the term, and so do 600 s without a result and without progress; the run can be
        resumed. A term that takes longer says that it gets on with `etude.progress.tick()`."""
        ...


@runtime_checkable
class GroupRewardTerm(Protocol):
    """Measures one part of the rewards of all rollouts of a group at once, such as their ranking.

    A plug-in of kind "reward" may be one instead of a `RewardTerm`. `version` is stored with every value; change it
    when the meaning of the value changes. `gives_hints`: as in `RewardTerm`."""

    version: str

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        """Measure the graded rollouts of one group, and return one `Score` for each, in the same order.

        `rollouts` has at least one element: the valid rollouts of the group in order of their ids, without those whose
        gate (`when`) is closed. A rollout's value must not depend on the order of the others. Values, unknown values
        and errors are as for `RewardTerm.score`."""
        ...


@runtime_checkable
class InRun(Protocol):
    """An optional interface of a reward term that needs the folder or the tokeniser of its run."""

    def enter(self, folder: Path, readable: Callable[[Iterable[int]], str]) -> None:
        """Called once in each process of a run, before the first value is measured.

        `folder`: the run's folder. `readable(token_ids)` returns tokens of a trace as text, one message per line with
        its role; it may be called from any thread."""
        ...


AnyRewardTerm = RewardTerm | GroupRewardTerm


@runtime_checkable
class CreditScheme(Protocol):
    """Computes advantages from the rewards of a group: the rollouts of one task. A plug-in of kind "credit" is one.

    It has no state. `version` is stored with the advantages; change it when the formula changes."""

    name: str
    version: str

    def advantages(self, rewards: Sequence[Reward]) -> Sequence[float]:
        """Return one finite advantage per reward, in the same order. `rewards` may have 0 or 1 elements.

        Equal rewards must get equal advantages, a higher reward no lower advantage, and the order of the rollouts must
        not matter. The same input must give the same bits. A rollout with advantage 0.0 is not trained on."""
        ...


@runtime_checkable
class TurnCreditScheme(Protocol):
    """An optional interface of a `CreditScheme` that gives each turn of a rollout its own advantage."""

    def turn_advantages(
        self, rewards: Sequence[Reward], turns: Sequence[Sequence[TurnPlace]]
    ) -> Sequence[Sequence[float]]:
        """Return one finite advantage per turn, for each rollout of the group.

        `turns`: the turns of each rollout, in the order of `rewards`; parents come before their children. For a rollout
        without turns, the result of `advantages` is used. The order of the rollouts must not matter, and the same input
        must give the same bits."""
        ...


@runtime_checkable
class PairCreditScheme(Protocol):
    """An optional interface of a `CreditScheme` that forms preference pairs, for `learner.policy_loss = "dpo"`."""

    def pairs(self, rewards: Sequence[Reward]) -> Sequence[tuple[int, int]]:
        """Return pairs (better, worse) of indices into `rewards`, each pair once.

        The reward of the better rollout must be higher, so equal rewards form no pair. The pairs must not depend on the
        order of the rollouts, and the same input must give the same pairs. Both rollouts of a pair are trained on,
        whatever their advantages. A pair with equal rewards, or with the lower one first, ends the run with a
        `PluginError`."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Samples completions from the current model. Rollouts, evaluations and the gateway all use this one method."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample a completion for a request. Many calls run at the same time.

        Raises `EngineError` when no engine can serve the request, or when it made no progress for the request's
        `deadline_s`; `EngineBehind` when no engine loaded the required weights in time (the request's `min_step` or
        `pin_step`); and `ContextFull` when prompt and completion do not fit the context. Cancelling the coroutine
        cancels the request."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An optional interface of a `Policy` or an `Engine` that can return tokens while they are sampled."""

    def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Yield lists of newly sampled token ids, and at the end one `Completion` with all of these tokens.

        Raises the errors of `complete` or `generate`. Closing the generator early cancels the request."""
        ...


@runtime_checkable
class Ending(Protocol):
    """An optional interface of a `Policy` or an `Engine` that can end a streamed request before its last token."""

    async def end(self, request_id: str) -> None:
        """End a request that is being streamed. Its completion has the tokens sampled so far, as if `max_tokens` had
        been reached.

        A request that is not known, or has ended, is ignored. If the engine does not respond, the request is sampled to
        its end."""
        ...


async def stream_or_complete(
    source: object,
    complete: Callable[[CompletionRequest], Awaitable[Completion]],
    request: CompletionRequest,
    *,
    enough: Callable[[list[int]], bool] | None = None,
) -> AsyncGenerator[list[int] | Completion]:
    """Stream a completion as `Streaming.stream` does, from any policy or engine.

    When `source` cannot stream, its method `complete`, given as the second argument, is awaited, and its tokens are
    yielded as one list. `enough` is called with each list of token ids. When it returns True, the request is ended
    early, if `source` supports this (`Ending`); otherwise the completion is sampled to its end."""
    if (stream := getattr(source, "stream", None)) is not None:  # isinstance(source, Streaming), but ten times faster
        async with aclosing(stream(request)) as parts:
            async for part in parts:
                if enough is not None and not isinstance(part, Completion) and enough(part):
                    enough = None
                    if isinstance(source, Ending):
                        await source.end(request.request_id)
                yield part
    else:
        completion = await complete(request)
        yield completion.token_ids.tolist()
        yield completion


@runtime_checkable
class BlobStore(Protocol):
    """Immutable objects under keys, and mutable pointers (small objects) that change by compare-and-swap.

    Keys are relative POSIX paths. Every method raises `StoreError` for a key that is not allowed, and when the store
    cannot be reached or is full. Methods may be called from several threads and processes."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object; it is durable when this returns. Does nothing when the key already has the same bytes.

        Raises `StoreError` when the key has other bytes."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` for a missing key, and `ValueError` for a negative or reversed range."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted. Raises `StoreError` for a prefix that no key can have."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. Does nothing when it does not exist."""
        ...

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Atomically replace a pointer's bytes if they equal `expected`, and return whether they were replaced.

        With `expected` None, the pointer is created if it does not exist."""
        ...


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state and load of an engine.

    - `version`: the version of the weights that it has loaded; None before the first.
    - `context_tokens`: the longest context, prompt and completion together.
    - `max_sequences`: how many sequences it decodes together.
    - `num_running`, `num_waiting`: the requests being decoded and in the queue.
    - `kv_tokens_free`: how many more tokens the KV cache can hold.
    - `capabilities`: "routes" (it returns the chosen experts), "spans" (it returns the version of the weights of each
      token), "stream", "adopt", "verify" (it has these methods), "pause-keep" (a pause keeps the KV cache), "exact"
      (its log-probabilities equal the learner's bit for bit).
    - `parity`: processes with an equal value compute the same bits from the same weights; "" if unknown.
    - `trouble`: why loading the newest weights failed; "" if it did not fail."""

    name: str
    version: Version | None
    paused: bool
    context_tokens: int
    max_sequences: int
    num_running: int
    num_waiting: int
    kv_tokens_free: int
    capabilities: tuple[str, ...]
    parity: str = ""
    trouble: str = ""


@runtime_checkable
class Engine(Protocol):
    """One inference server. It loads new versions of the weights by itself while it serves.

    Many calls run at the same time; the server batches them."""

    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample a completion. Cancelling the coroutine cancels the request.

        The request's `fork_from` is a hint to reuse another session's KV cache. It never changes the result, and an
        engine with its own prefix cache may ignore it. Raises `EngineBehind` (HTTP 409) when the engine does not have
        the weights that the request requires (`min_step`, `pin_step`), `ContextFull` (413) when prompt and completion
        do not fit the context, and `EngineError` for other failures, such as no progress for the request's
        `deadline_s`."""
        ...

    async def pause(self) -> None:
        """Stop decoding between two tokens. Running requests keep their KV cache until `resume`; new requests wait."""
        ...

    async def resume(self) -> None:
        """Continue decoding after `pause`. Does nothing when the engine is not paused."""
        ...

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        """Wait until the engine has loaded weights of training step `min_step` or later, and return their version.

        The engine fetches versions by itself. Raises `EngineError` at the deadline."""
        ...

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        """Return the current state and load, without waiting for running requests.

        Raises `EngineError` when the engine does not answer within `deadline_s` seconds."""
        ...

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        """Compute the log-probabilities of a text at temperature 1, and return them with the version of the weights.

        There is one number for each token but the first: len(token_ids) - 1. A new version of the weights counts as
        loaded correctly only when these numbers agree with the learner's. Raises `EngineError` when the engine cannot
        compute them."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Trains the weights of a model and publishes them. All methods are called from one thread."""

    def forward_backward(self, batch: Batch) -> StepReport:
        """Compute the loss of a batch and add its gradient to the accumulated one.

        Raises `NotFinite` for NaN or Inf, and `ParityError` when a probability ratio between learner and engine must be
        1 and is not."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Apply and clear the accumulated gradient, and increase the step by one.

        Returns the metrics "grad_norm" (before clipping) and "lr", and possibly others. Raises `NotFinite` for NaN or
        Inf."""
        ...

    def save(self, path: str) -> None:
        """Write a checkpoint directory that `load` and Hugging Face transformers can read.

        The directory appears complete or not at all. Raises `CheckpointError` when it cannot be written."""
        ...

    def load(self, path: str) -> None:
        """Continue from a directory that `save` wrote, or start at step 0 from any other Hugging Face directory.

        Raises `CheckpointError` for a directory that cannot be used."""
        ...

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        """Publish the weights as a new version for the engines. `rollout_ids`: the rollouts that they were trained on.

        The bytes are written first, then a manifest with the rollouts, then the pointer to the newest version moves:
        from then on the version is published. Raises `WeightsError` when another writer published first, and
        `StoreError` when the store cannot be written."""
        ...


@runtime_checkable
class AnswerRecorder(Protocol):
    """Receives the answers that a gateway serves, for example to store them."""

    def offer(self, answer: ServedAnswer) -> None:
        """Record an answer. Called in the gateway's event loop: it returns at once, and never raises."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Return the number of answers for each possible outcome, such as "dropped"."""
        ...


class FeedbackReceiver(AnswerRecorder, Protocol):
    """Names the responses of a gateway such that signals about them can be verified, and takes the signals.

    As a recorder it sees every answer, and learns from it which version of a model answers.

    `bodies`: the msgspec structs of which a body of `receive` is one; for the OpenAPI document."""

    bodies: tuple[type[msgspec.Struct], ...]

    def new_id(self, organisation: str, user: str, model: str, answers: int = 1) -> str:
        """Return the id of a new response to a user ("": no named one) by a served model, hexadecimal. Never raises.

        `answers`: the number of answers in the response."""
        ...

    def receive(self, organisation: str, user: str, body: bytes) -> Future[Sequence[tuple[str, str]]]:
        """Take the body of a request with signals. The result has (id, status) of each signal once they are durable.

        The result raises `SignalRefused`, after which none of them is kept, or another `EtudeError` if they cannot be
        stored now. So does this method, if too many wait."""
        ...


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run that a tracker gets at its start.

    `name` is the name of the run folder, and `folder` its path. `run_id` is unique and stays the same when the run is
    resumed; `resumed`: whether metrics were logged already before the run was resumed. `config` has the settings as
    nested dicts, without secrets. `facts` is the content of run.json: versions and the host."""

    name: str
    run_id: str
    folder: str
    resumed: bool
    config: Mapping[str, Any]
    facts: Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run, such as TensorBoard or W&B. A plug-in of kind "tracker" is one.

    It runs in a separate process, whose main thread makes all calls in order. An exception is reported and never ends
    the run; after `start` has raised, nothing else is called. A `TrackerWarning` is also shown to the user."""

    def start(self, run: TrackedRun) -> None:
        """Begin to record a run. Called once, before all other methods."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step: name, such as "rl/loss", → value. Values may be NaN or infinite.

        Steps count from 0 or 1, separately for each prefix before the slash. A step that is trained again after a
        restart is logged again."""
        ...

    def finish(self, outcome: str) -> None:
        """Write everything that is buffered. Called last. `outcome` is "finished", "stopped" or "failed".

        Afterwards the process ends without running its exit handlers. It is killed if this method takes longer than 30
        s."""
        ...
