"""Tensors into stored objects: grouped, encoded, put under keys that no other publish uses.

A key is the content's SHA-256 and eight characters that were drawn for the publish: two publishes never share an
object, so garbage collection of the one cannot take what the other is about to name. Knows nothing of manifests.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from etude import progress
from etude.seams import BlobStore
from etude.weights.chain.manifest import StoredObject
from etude.weights.delta import codec
from etude.weights.delta.layout import header_bytes
from etude.weights.tensors import Tensor

OBJECT_ELEMENTS = 1 << 26
"""Tensors are gathered into objects of about so many elements, the unit of fetching again."""


def put_objects(
    store: BlobStore,
    name: str,
    nonce: str,
    new: Sequence[Tensor],
    old: Callable[[int, int], Sequence[Tensor | None]],
) -> tuple[tuple[StoredObject, ...], float]:
    """Encode tensors in groups, and put each group as an object. Returns the objects, and the seconds of encoding.

    `old(start, stop)`: returns the base tensors of `new[start:stop]`. It is called group by group, so that they need
    not all be in memory at once.
    """
    objects: list[StoredObject] = []
    encode_s = 0.0
    for start, stop in _groups(new):
        before = old(start, stop)
        started = time.perf_counter()
        data = codec.encode(new[start:stop], before)
        digest = hashlib.sha256(data).hexdigest()
        header = memoryview(data)[: header_bytes(data)]
        encode_s += time.perf_counter() - started
        key = f"{objects_prefix(name)}{digest[:2]}/{digest}-{nonce[:8]}"
        store.put(key, data)
        header_sha256 = hashlib.sha256(header).hexdigest()
        progress.tick()
        objects.append(StoredObject(key, len(data), digest, len(header), header_sha256, stop - start))
    return tuple(objects), encode_s


def objects_prefix(name: str) -> str:
    """Where a channel's objects are."""
    return f"objects/{name}/"


def _groups(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """[start, stop) of each object's tensors."""
    groups: list[tuple[int, int]] = []
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.codes.size > OBJECT_ELEMENTS:
            groups.append((start, i))
            start, size = i, 0
        size += tensor.codes.size
    return [*groups, (start, len(tensors))]
