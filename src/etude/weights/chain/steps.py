"""What each step of a channel's lineage was trained on, read from the head back, one manifest at a time.

A long run has thousands of manifests: whoever asks which rollouts were trained needs none of them for longer than a
moment. Knows nothing of ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator

from etude.seams import BlobStore
from etude.weights.chain.history import backward
from etude.weights.chain.manifest import Ref


class Steps:
    """(step, rollout ids) of each version of a lineage, the newest first; read anew by each loop over it. `down_to`: a
    step at which it ends.

    Where a manifest is lost or damaged it ends there, and `damaged` is set: what was trained up to that one's step,
    `believed()`, must be known from elsewhere.
    """

    def __init__(self, store: BlobStore, name: str = "policy", *, down_to: int = -1) -> None:
        self._store, self._name, self._down_to = store, name, down_to
        self.damaged: Ref | None = None

    def believed(self) -> int:
        return 0 if self.damaged is None else self.damaged.version.step

    def __iter__(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        self.damaged = None
        for found in backward(self._store, self._name):
            if isinstance(found, Ref):
                self.damaged = found
                return
            if found.version.step <= self._down_to:
                return
            yield found.version.step, found.rollout_ids
