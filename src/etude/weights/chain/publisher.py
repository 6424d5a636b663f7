"""Publishes versions in a background thread, one at a time, so that a trainer waits only until its weights are copied.

`offer` copies the weights and returns. A thread computes digests, encodes and uploads; it releases the GIL for most of
that. The next `offer` waits until the previous publish has ended. So versions are published in order, and memory holds
two copies: the last published version, which the next delta is computed from, and the one being published. The two
buffers are used in turn, since allocating new pages takes longer than copying. Knows nothing of optimisers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import numpy as np

from etude import progress
from etude.errors import DeadlineExceeded, WeightsError
from etude.records.completion import Version
from etude.records.sample import Published
from etude.weights.tensors import Codes, Tensor

DEADLINE_S = 600.0

Buffers = dict[str, Codes]


class Writer(Protocol):
    """A channel that versions are published to: `Channel` or `ShardedChannel`."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        owned: bool = False,
    ) -> Published:
        """Publish a version and return its name and sizes. The arguments are those of `Channel.publish`."""
        ...


class Publisher:
    """Publishes versions in a background thread, so that a trainer waits only until its weights are copied.

    A context manager: the block's end calls `close`. Nothing else may use the channel meanwhile. Not thread-safe.

    `parent`: the version that the first offer was trained from; each later one was trained from the one before.
    `deadline_s`: how many seconds a call waits for the previous publish while this process makes no progress
    (`etude.progress`).

    >>> from etude.stores import MemoryStore
    >>> from etude.weights.chain.channel import Channel
    >>> weights = {"w": Tensor("bf16", (2,), np.array([0x3F80, 0x3F81], np.uint16))}
    >>> with Publisher(Channel(MemoryStore())) as publisher:
    ...     publisher.offer(weights, step=0, rollout_ids=[])
    ...     publisher.wait().version.step
    0
    """

    def __init__(self, channel: Writer, *, parent: Version | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._channel, self._parent, self._deadline_s = channel, parent, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._outstanding: tuple[int, Buffers, Future[Published]] | None = None
        self._published: Published | None = None
        self._held: Buffers = {}  # of the last published version: the channel computes the next delta from them
        self._spare: Buffers = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, tensors: Mapping[str, Tensor], *, step: int, rollout_ids: Sequence[str]) -> None:
        """Copy the tensors and start to publish them in the background as the version of step `step`.

        Waits for the previous publish first. Raises that publish's error (its rollouts are then in no version), or
        `DeadlineExceeded` if it has not ended in time. In both cases this version is not published and the call can be
        repeated. `rollout_ids`: the rollouts that the step was trained on.
        """
        if self._closed:
            raise WeightsError(f"step {step} cannot be published: the publisher is closed", hint="make a new Publisher")
        self.wait()
        buffers = {name: _copied(tensor.codes, self._spare.get(name)) for name, tensor in tensors.items()}
        self._spare = {}
        owned = {name: Tensor(tensor.dtype, tensor.shape, buffers[name]) for name, tensor in tensors.items()}
        future = self._thread.submit(
            self._channel.publish, owned, step=step, parent=self._parent, rollout_ids=tuple(rollout_ids), owned=True
        )
        self._outstanding = step, buffers, future

    def wait(self) -> Published | None:
        """Wait until no publish is running. Return the last published version and its sizes; None before the first.

        Raises the error of the publish, or `DeadlineExceeded` if it has not ended in time; then wait again.
        """
        outstanding = self._outstanding  # read once: another thread may call this too
        if outstanding is None:
            return self._published
        step, buffers, future = outstanding
        try:
            published = self._result(future)
        except TimeoutError as error:
            if future.done():  # a TimeoutError of the store
                self._outstanding = None
                raise
            raise DeadlineExceeded(
                f"publishing step {step} did not end, and made no progress for {self._deadline_s:g} s",
                f"last published: {self._published.version if self._published else self._parent}",
                hint="check the store, which is slow or hangs; the publish continues: call `wait` again",
            ) from error
        except BaseException:  # its buffers are not reused: the commit may have succeeded nevertheless
            self._outstanding = None
            raise
        self._outstanding = None
        self._held, self._spare = buffers, self._held
        self._published, self._parent = published, published.version
        return published

    def _result(self, future: Future[Published]) -> Published:
        seen = progress.count()
        while True:
            try:
                return future.result(self._deadline_s)
            except TimeoutError:
                if future.done() or seen == (seen := progress.count()):
                    raise

    def close(self) -> None:
        """Wait for the running publish and end the thread. May be called twice. Raises the errors of `wait`."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=self._outstanding is None)


def _copied(codes: Codes, spare: Codes | None) -> Codes:
    if spare is None or spare.shape != codes.shape or spare.dtype != codes.dtype:
        return codes.copy()
    np.copyto(spare, codes)
    return spare
