"""`encode`, `apply` and `bound`: deltas between two sets of named arrays, in one file's bytes each.

For who has a trainer and an engine of his own and moves bytes as he likes. A delta says what it applies to: `apply`
compares the base's digests first, proves every tensor it made, and only then writes. Knows nothing of channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import WeightsError, nearest
from etude.weights import codec
from etude.weights.arrays import Array, Arrays, bits_of, like, tensor_of
from etude.weights.bound import bound_bytes
from etude.weights.delta_file import DeltaFile, Entry, Kind, damaged, read, write_head, write_object_head
from etude.weights.tensors import Codes, Spec, Tensor, tensor_digest

OBJECT_ELEMENTS = 1 << 26
"""Tensors are gathered into objects of about so many elements: what a side holds beside base and target."""

LIMIT_BYTES = 64 << 30


def encode(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None) -> bytes:
    """The bytes from which `apply` makes `new` out of `old`, bit for bit.

    `dtypes` names what the arrays' own dtypes do not say, for both sides. Tensors may come, go, and change their dtype
    or shape. Raises `WeightsError`.

    >>> old = {"w": np.array([0x3F80, 0x3F81], np.uint16)}
    >>> new = {"w": np.array([0x3F80, 0x3F82], np.uint16)}
    >>> delta = encode(old, new, {"w": "bf16"})
    >>> apply(old, delta)["w"].tolist()
    [16256, 16258]
    """
    return b"".join(parts(old, new, dtypes))


def parts(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None, *, note: bytes = b"") -> Iterator[bytes]:
    """The same bytes piece by piece, for a file: beside what is mapped, one object's tensors are in memory at a time.

    `note` is kept in the file for whoever reads it there. Every array is read twice.
    """
    before, after = tensors(old, dtypes), tensors(new, dtypes)
    entries = [_entry(name, before.get(name), after.get(name)) for name in _sorted(before.keys() | after.keys())]
    coded = [entry.name for entry in entries if entry.coded]
    spans = groups([after[name] for name in coded])
    proof = hashlib.sha256()
    for piece in _pieces(write_head(entries, note, len(spans)), before, after, [coded[a:b] for a, b in spans]):
        proof.update(piece)
        yield piece
    yield proof.digest()


def apply(
    old: Arrays, delta: bytes | memoryview, out: Mapping[str, Any] | None = None, *, limit_bytes: int = LIMIT_BYTES
) -> dict[str, Array]:
    """The arrays that `encode` was given as new, by name, in numpy's dtype where it has one, else as unsigned codes.

    Without `out` unchanged tensors are the base's own memory. With `out`, a writable buffer for every tensor of the
    target, everything is written there; a buffer that is the base's own (`out=old`) is changed in place, and takes the
    changes alone. Nothing is written before all is proven. Raises `WeightsError`: bytes that are damaged, another
    base, a target of more than `limit_bytes`, buffers that do not fit.
    """
    file = read(delta)
    if file.target_bytes > limit_bytes:
        raise WeightsError(
            f"the delta's target needs {file.target_bytes} bytes",
            f"the limit is {limit_bytes}",
            hint="raise limit_bytes if this is the model you expect",
        )
    base = prove_base(file, old)
    if out is None:
        made = {name: tensor for group in decoded(file, base) for name, tensor in group.items()}
        return {
            entry.name: like(made.get(entry.name) or base[entry.name], old.get(entry.name))
            for entry in file.entries
            if entry.new
        }
    places = {e.name: _place(e.name, e.new, out) for e in file.entries if e.new}
    _refuse_torn_ties(file, places)
    writes = [_write(entry.name, base[entry.name], None, places) for entry in file.entries if entry.kind is Kind.SAME]
    for group in decoded(file, base):
        writes += [_write(name, base.get(name), tensor, places) for name, tensor in group.items()]
    for write in writes:
        write.put()
    return {name: out[name] if isinstance(out[name], np.ndarray) else place for name, place in places.items()}


def bound(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None) -> float:
    """The bytes that no delta of this kind can go below; the formula is `etude.weights.bound_bytes`'s.

    >>> w = {"w": np.zeros(8, np.float32)}
    >>> bound(w, w)
    0.0
    """
    before, after = tensors(old, dtypes), tensors(new, dtypes)
    return bound_bytes(list(after.values()), [before.get(name) for name in after])


def tensors(arrays: Arrays, dtypes: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Every array as a tensor. Raises `WeightsError` that names the one that cannot be."""
    return {name: tensor_of(name, array, (dtypes or {}).get(name)) for name, array in arrays.items()}


def prove_base(file: DeltaFile, old: Arrays) -> dict[str, Tensor]:
    """The base's tensors as the delta names them, each with the digest that the delta states. Raises `WeightsError`."""
    base: dict[str, Tensor] = {}
    for entry in file.entries:
        if entry.old is None or entry.old_digest is None:
            continue
        if entry.name not in old:
            raise _wrong_base(f"it has no tensor {entry.name!r}", nearest(entry.name, old))
        tensor = base[entry.name] = _shaped(entry.name, old[entry.name], entry.old)
        if (found := tensor_digest(tensor)) != entry.old_digest:
            raise _wrong_base(f"{entry.name!r} has digest {found[:12]}, the delta is for {entry.old_digest[:12]}")
    extra = old.keys() - base.keys()
    if extra:
        raise _wrong_base(f"it has a tensor {min(extra)!r} that the delta does not know")
    return base


def decoded(file: DeltaFile, base: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The coded tensors, object by object, each proven. Raises `WeightsError`."""
    coded = iter([entry for entry in file.entries if entry.coded])
    for count, data in file.objects:
        entries = [next(coded) for _ in range(count)]
        specs = [entry.new for entry in entries if entry.new]
        made = codec.decode(bytes(data), specs, [base.get(entry.name) for entry in entries])
        for entry, tensor in zip(entries, made, strict=True):
            if (found := tensor_digest(tensor)) != entry.new_digest:
                raise damaged(f"{entry.name!r} became {found[:12]}, not {str(entry.new_digest)[:12]}")
        yield {entry.name: tensor for entry, tensor in zip(entries, made, strict=True)}


@dataclass(frozen=True)
class _Write:
    """What goes into one buffer: codes at places, or all of them."""

    target: Codes
    places: Any  # int64 indices, or ... for all
    codes: Codes

    def put(self) -> None:
        self.target[self.places] = self.codes


def _entry(name: str, old: Tensor | None, new: Tensor | None) -> Entry:
    old_digest, new_digest = (tensor_digest(side) if side else None for side in (old, new))
    return Entry(name, old.spec if old else None, old_digest, new.spec if new else None, new_digest)


def _pieces(
    head: bytes, before: Mapping[str, Tensor], after: Mapping[str, Tensor], groups: Sequence[Sequence[str]]
) -> Iterator[bytes]:
    yield head
    for names in groups:
        data = codec.encode([after[name] for name in names], [before.get(name) for name in names])
        yield write_object_head(len(data), len(names))
        yield data


def _shaped(name: str, value: Any, spec: Spec) -> Tensor:
    """A base's value as what the delta says it was; a flat buffer stands for every shape of its size."""
    tensor = tensor_of(name, value, None if isinstance(value, Tensor) else spec.dtype)
    if tensor.spec != spec and len(tensor.shape) == 1 and tensor.spec.size == spec.size and tensor.dtype == spec.dtype:
        tensor = Tensor(spec.dtype, spec.shape, tensor.codes)
    if tensor.spec != spec:
        raise _wrong_base(f"{name!r} is {_told(tensor.spec)}, the delta is for {_told(spec)}")
    return tensor


def _place(name: str, spec: Spec | None, out: Mapping[str, Any]) -> Codes:
    """Where a tensor goes: the buffer's own memory as flat codes."""
    assert spec is not None
    if name not in out:
        raise WeightsError(f"out has no tensor {name!r}", f"the delta makes {_told(spec)}", hint=nearest(name, out))
    bits = bits_of(name, out[name])[0]
    codes = np.dtype(f"u{spec.num_bytes // spec.size}") if spec.size else bits.dtype
    if bits.ndim == 1 and bits.itemsize == 1 and bits.flags.c_contiguous and bits.nbytes == spec.num_bytes:
        bits = bits.view(codes)
    fits = bits.dtype == codes and (bits.shape == spec.shape or bits.shape == (spec.size,))
    native = getattr(getattr(out[name], "dtype", None), "isnative", True)  # of others' bytes the bits are a copy
    if not (fits and native and bits.flags.c_contiguous and bits.flags.writeable and bits.flags.aligned):
        raise WeightsError(
            f"out[{name!r}] cannot take the tensor",
            f"it is {bits.shape} of {bits.itemsize} bytes, the tensor {_told(spec)}",
            hint="give a writable, contiguous buffer of the target's size",
        )
    return bits.reshape(-1)


def _refuse_torn_ties(file: DeltaFile, places: Mapping[str, Codes]) -> None:
    """One buffer under two names takes one tensor's bits. Raises `WeightsError`."""
    held: dict[int, Entry] = {}
    for entry in file.entries:
        if entry.new is None or not entry.new.size:
            continue
        first = held.setdefault(places[entry.name].ctypes.data, entry)
        if first.new_digest != entry.new_digest:
            raise WeightsError(
                f"out[{first.name!r}] and out[{entry.name!r}] are the same memory",
                f"their tensors differ: {str(first.new_digest)[:12]} and {str(entry.new_digest)[:12]}",
                hint="the checkpoint does not tie them: give each a buffer of its own",
            )


def _write(name: str, old: Tensor | None, new: Tensor | None, places: Mapping[str, Codes]) -> _Write:
    """What has to be written; the changes alone where the buffer is the base's own memory."""
    place = places[name]
    tensor = new or old
    assert tensor is not None
    if old is not None and old.spec == tensor.spec and place.ctypes.data == old.codes.ctypes.data:
        where = np.flatnonzero(old.codes != tensor.codes) if new else np.empty(0, np.intp)
        if where.nbytes + where.size * place.itemsize < tensor.num_bytes:
            return _Write(place, where, tensor.codes[where])
    return _Write(place, ..., tensor.codes)


def _wrong_base(facts: str, more: str = "") -> WeightsError:
    hint = "apply it to the version that it was made from; nothing was changed"
    return WeightsError("this delta is for another base", facts, hint=f"{hint}{'; ' + more if more else ''}")


def _told(spec: Spec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _sorted(names: set[str]) -> list[str]:
    return sorted(names, key=str.encode)


def groups(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """[start, stop) of each object's tensors; none for none."""
    found: list[tuple[int, int]] = []
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.codes.size > OBJECT_ELEMENTS:
            found.append((start, i))
            start, size = i, 0
        size += tensor.codes.size
    return [*found, (start, len(tensors))] if tensors else []
