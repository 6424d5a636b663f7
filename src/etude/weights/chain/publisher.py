"""Publishing in the background, one outstanding: a trainer waits for its weights to be read, and for nothing else.

`offer` copies the weights and returns; digests, encoding and upload happen in one thread, which holds no lock of the
interpreter while it hashes, encodes and writes. The next offer waits until the one before has ended, so versions are
published in order and memory holds two copies: what was published last, which the next delta is taken from, and what
is on its way. Their memory takes turns, since fresh pages cost more than copying. Knows nothing of optimisers.
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
    """Where versions are published: `Channel`, `ShardedChannel`."""

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        parent: Version | None,
        rollout_ids: Sequence[str],
        owned: bool = False,
    ) -> Published:
        """See `Channel.publish`."""
        ...


class Publisher:
    """Publishes through a channel, which nobody else uses meanwhile. Not safe between threads.

    `parent`: the version that the first offer was trained from; each later one was trained from the one before.
    `deadline_s`: how long a call waits for the publish before while nothing of this process gets on
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
        self._held: Buffers = {}  # of what was published last: the channel takes the next delta from them
        self._spare: Buffers = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, tensors: Mapping[str, Tensor], *, step: int, rollout_ids: Sequence[str]) -> None:
        """Publish a version soon; the tensors are copied before this returns.

        Raises what the publish before failed with (its rollouts are then in no version), and `DeadlineExceeded` when
        it has not ended in time. Nothing of this offer is taken then, and it may be repeated.
        """
        if self._closed:
            raise WeightsError(f"step {step} cannot be published: the publisher is closed", hint="make another")
        self.wait()
        buffers = {name: _copied(tensor.codes, self._spare.get(name)) for name, tensor in tensors.items()}
        self._spare = {}
        owned = {name: Tensor(tensor.dtype, tensor.shape, buffers[name]) for name, tensor in tensors.items()}
        future = self._thread.submit(
            self._channel.publish, owned, step=step, parent=self._parent, rollout_ids=tuple(rollout_ids), owned=True
        )
        self._outstanding = step, buffers, future

    def wait(self) -> Published | None:
        """What was published last, once nothing is outstanding; None before the first. Raises as `offer` does."""
        outstanding = self._outstanding  # once: it may be waited for in a thread of its own
        if outstanding is None:
            return self._published
        step, buffers, future = outstanding
        try:
            published = self._result(future)
        except TimeoutError as error:
            if future.done():  # the store's own
                self._outstanding = None
                raise
            raise DeadlineExceeded(
                f"publishing step {step} did not end, and did not get on for {self._deadline_s:g} s",
                f"published last: {self._published.version if self._published else self._parent}",
                hint="the store is slow or hangs; waiting again goes on with the same publish",
            ) from error
        except BaseException:  # its buffers are left alone: the commit may have happened all the same
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
        """Wait for what is outstanding and end. Idempotent. Raises as `wait` does."""
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
