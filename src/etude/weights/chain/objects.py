"""Encodes tensors into stored objects, in groups, under keys that no other publish uses.

A key is the SHA-256 of the content and eight characters that are random per publish. Two publishes never share an
object, so garbage collection for one cannot delete an object that the other is about to use.
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


def put_objects(
    store: BlobStore,
    name: str,
    nonce: str,
    new: Sequence[Tensor],
    old: Callable[[int, int], Sequence[Tensor | None]],
) -> tuple[tuple[StoredObject, ...], float]:
    """Encode tensors of channel `name` in groups, and store each group as an object.

    Return the objects in order, and the encoding time in seconds. `old(start, stop)` returns the tensors that
    `new[start:stop]` are encoded against; None in its result means that a tensor is stored in full. It is called group
    by group, so these tensors need not all be in memory at once. The first 8 characters of `nonce` end each key.
    """
    objects: list[StoredObject] = []
    encode_s = 0.0
    for start, stop in codec.object_spans(new) or [(0, 0)]:
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
    """Return the prefix that the store keys of all encoded tensors of channel `name` have."""
    return f"objects/{name}/"
