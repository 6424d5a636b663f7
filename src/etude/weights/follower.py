"""The reader's side: holds one version's exact tensors and moves to the head, whole or not at all.

Everything is fetched, decoded and proven before anything of the follower changes, so a failed advance costs nothing
and an engine's pause contains the scatter alone. A lost or damaged delta heals from the nearest anchor that works.
Knows nothing of engines: it says which codes changed, and where.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights import history
from etude.weights.manifest import Manifest
from etude.weights.tensors import Codes, Tensor

LIMIT_BYTES = 64 << 30


@dataclass(frozen=True)
class Update:
    """What is different between the version held before and the one held now. Proven before it is made."""

    version: Version
    changed: Mapping[str, tuple[npt.NDArray[np.int64], Codes]]  # name -> sorted flat positions, their new codes
    replaced: Mapping[str, Tensor]  # tensors that are new, or had another dtype or shape; all of them at the start
    removed: tuple[str, ...]  # names that are no more
    fetch_s: float  # fetching, decoding, proving
    fetched_bytes: int  # objects that were fetched, those of plans that failed not counted
    healed: tuple[str, ...] = ()  # why plans before the one that worked failed


class Follower:
    """Follows one channel of a store. Not safe between threads.

    `limit_bytes`: a version whose tensors need more is refused before anything of it is fetched.

    >>> from etude.stores import MemoryStore
    >>> Follower(MemoryStore()).advance() is None
    True
    """

    def __init__(self, store: BlobStore, name: str = "policy", *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._store, self._name, self._limit_bytes = store, name, limit_bytes
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}

    @property
    def version(self) -> Version | None:
        """What is held; None at the start."""
        return self._version

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The held version's tensors by name."""
        return MappingProxyType(self._tensors)

    def pointer(self) -> Version | None:
        """The head's version; None before the first publish. One read of some hundred bytes."""
        pointer = history.head(self._store, self._name)
        return pointer.head.version if pointer else None

    def advance(self) -> Update | None:
        """Move to the head; None when it is held already or there is none.

        Raises `WeightsError` when no plan leads there, naming why each failed; what was held is held still.
        """
        started = time.perf_counter()
        pointer = history.head(self._store, self._name)
        if pointer is None or pointer.head.version == self._version:
            return None
        target = history.load(self._store, pointer.head)
        self._check_size(target)
        tensors, fetched_bytes, failures = self._reach(target)
        changed, replaced = compare(self._tensors, tensors)
        update = Update(
            version=target.version,
            changed=changed,
            replaced=replaced,
            removed=tuple(sorted(self._tensors.keys() - tensors.keys())),
            fetch_s=time.perf_counter() - started,
            fetched_bytes=fetched_bytes,
            healed=tuple(failures),
        )
        self._version, self._tensors = target.version, tensors
        return update

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the held version in other memory: tensors of the same names and bits, for instance a shared image."""
        self._tensors = dict(tensors)

    def _reach(self, target: Manifest) -> tuple[dict[str, Tensor], int, list[str]]:
        failures: list[str] = []
        for plan in history.plans(self._store, target, self._version):
            try:
                for manifest, _ in plan.steps:
                    self._check_size(manifest)
                return *history.run(self._store, plan, self._tensors), failures
            except EtudeError as error:
                failures.append(f"{error.what} ({error.facts})" if error.facts else error.what)
        raise history.unreachable(target, failures)

    def _check_size(self, manifest: Manifest) -> None:
        if manifest.snapshot_bytes > self._limit_bytes:
            raise WeightsError(
                f"{manifest.version} needs {manifest.snapshot_bytes} bytes",
                f"the limit is {self._limit_bytes}",
                hint="raise limit_bytes if this is the model you expect",
            )


def compare(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[npt.NDArray[np.int64], Codes]], dict[str, Tensor]]:
    """What `Update` calls changed and replaced. Tensors with equal bits are in neither."""
    changed: dict[str, tuple[npt.NDArray[np.int64], Codes]] = {}
    replaced = {}
    for name, tensor in new.items():
        before = old.get(name)
        if before is None or before.spec != tensor.spec:
            replaced[name] = tensor
        elif before is not tensor:
            where: npt.NDArray[Any] = np.flatnonzero(before.codes != tensor.codes)
            if where.size:
                changed[name] = where.astype(np.int64, copy=False), tensor.codes[where]
    return changed, replaced
