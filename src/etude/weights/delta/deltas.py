"""`encode`, `apply` and `bound`: deltas between two sets of named arrays, as the bytes of one delta file.

For users who have their own trainer and engine and move the bytes themselves. A delta contains checksums of its base.
`apply` verifies the delta by its SHA-256, compares a checksum of every tensor of the base and of the target, and only
then writes. A checksum detects accidents (a wrong base, a flipped bit); it does not protect against a forged base.
Knows nothing of channels.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from etude.errors import WeightsError, nearest
from etude.weights.delta import codec
from etude.weights.delta.arrays import Array, Arrays, bits_of, check_arrays, tensor_of, to_array
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.changes import apply_changes, write
from etude.weights.delta.checksums import checksum, checksums, checksums_before_after
from etude.weights.delta.choices import Mode, check_mode
from etude.weights.delta.delta_file import DeltaFile, Entry, Kind, damaged, read, write_head, write_object_head
from etude.weights.tensors import Codes, Spec, Tensor, same_bits

LIMIT_BYTES = 64 << 30


def encode(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None, mode: Mode = "best") -> bytes:
    """Encode the delta from the arrays `old` to the arrays `new`. Return the bytes of a delta file, for `apply`.

    `old`, `new`: tensor name -> numpy array, CPU torch tensor, `Tensor`, or object with the buffer protocol. Names,
    dtypes and shapes may differ between the two. `dtypes`: tensor name -> dtype name ("bf16", "f8_e4m3", ...; all are
    in `tensors.DTYPES`), for arrays whose own dtype does not say it; valid for both sides. `mode`: "best" for neural
    networks, "fast" if time matters more than size. `docs/formats/delta_file.md` defines the file.

    Raises `WeightsError` for an array that cannot be encoded; the error names the tensor.

    >>> old = {"w": np.array([0x3F80, 0x3F81], np.uint16)}
    >>> new = {"w": np.array([0x3F80, 0x3F82], np.uint16)}
    >>> delta = encode(old, new, {"w": "bf16"})
    >>> apply(old, delta)["w"].tolist()
    [16256, 16258]
    """
    return b"".join(parts(old, new, dtypes, mode))


def parts(
    old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None, mode: Mode = "best", *, note: bytes = b""
) -> Iterator[bytes]:
    """Encode a delta as `encode` does, but yield its bytes piece by piece, for writing to a file.

    Only one encoded group of tensors is in memory at a time, in addition to `old` and `new`. Every array is read twice.
    `note`: bytes that are stored in the file for the caller. The other arguments are those of `encode`.
    """
    check_mode(mode)
    before, after = _sides(old, new, dtypes)
    entries = [_entry(name, before.get(name), after.get(name)) for name in _sorted(before.keys() | after.keys())]
    coded = [entry.name for entry in entries if entry.coded]
    spans = codec.object_spans([after[name] for name in coded])
    proof = hashlib.sha256()
    for piece in _pieces(write_head(entries, note, len(spans)), before, after, [coded[a:b] for a, b in spans], mode):
        proof.update(piece)
        yield piece
    yield proof.digest()


def apply(
    old: Arrays, delta: bytes | memoryview, out: Mapping[str, Any] | None = None, *, limit_bytes: int = LIMIT_BYTES
) -> dict[str, Array]:
    """Apply a delta to the arrays it was made from. Return the new arrays by name, bit for bit those given to `encode`.

    `old`: the base, as for `encode`. `delta`: the bytes from `encode`. `limit_bytes`: maximum size of all new arrays.

    Without `out`, new numpy arrays are returned (in numpy's dtype if it has one, else unsigned codes). Unchanged
    tensors share the memory of `old`. With `out`, the result is written into its buffers: a writable, contiguous one
    for every new array. `out=old` updates the base in place and writes only the changes. For a buffer that is not a
    numpy array, the flat codes are returned.

    Nothing is written before everything is verified. Raises `WeightsError` for a damaged delta, a different base, a
    target above `limit_bytes`, or buffers that do not fit.
    """
    check_bytes(delta)
    file = read(delta)
    if file.target_bytes > limit_bytes:
        raise WeightsError(
            f"the delta's target needs {file.target_bytes} bytes",
            f"the limit is {limit_bytes}",
            hint="raise limit_bytes if this is the model you expect",
        )
    base = fit_base(file, old)
    _check_uncoded(file, base)
    if out is None:
        made = {name: tensor for group in decode_tensors(file, base) for name, tensor in group.items()}
        return {
            entry.name: to_array(made.get(entry.name) or base[entry.name], old.get(entry.name))
            for entry in file.entries
            if entry.new
        }
    found = dict(_checked_changes(file, base))
    places = {e.name: _place(e.name, e.new, out) for e in file.entries if e.new}
    _refuse_overlaps(file, base, places)
    writes = [_Write(places[e.name], base[e.name].codes) for e in file.entries if e.kind is Kind.SAME]
    writes += [_Write(places[name], *made) for name, made in found.items()]
    _put(writes)
    return {name: out[name] if isinstance(out[name], np.ndarray) else place for name, place in places.items()}


def bound(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None = None) -> float:
    """Compute a lower bound for the size of the delta from `old` to `new`, in bytes.

    It holds for a coder that predicts a change only by the old exponent of a weight. `delta/bound.py` has the formula.
    The arguments are those of `encode`.

    >>> w = {"w": np.zeros(8, np.float32)}
    >>> bound(w, w)
    0.0
    """
    before, after = _sides(old, new, dtypes)
    return bound_bytes(list(after.values()), [before.get(name) for name in after])


def check_bytes(delta: object) -> None:
    """Raise `WeightsError` if `delta` is not bytes, for instance a path."""
    try:
        memoryview(delta)  # type: ignore[arg-type]
    except TypeError:
        raise WeightsError(
            f"this delta is a {type(delta).__name__}",
            "a delta is the bytes that `encode` returned",
            hint='for a file, pass its content: Path("step.etdf").read_bytes()',
        ) from None


def _sides(old: Arrays, new: Arrays, dtypes: Mapping[str, str] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Convert both sides to tensors. Raises `WeightsError`, also for a name in `dtypes` that neither side has."""
    before, after = tensors(old, dtypes), tensors(new, dtypes)
    for name in dtypes or {}:
        if name not in before and name not in after:
            raise WeightsError(
                f"dtypes names {name!r}, but no tensor has this name",
                "neither old nor new",
                hint=nearest(str(name), before.keys() | after.keys()) if before or after else "there are no tensors",
            )
    return before, after


def tensors(arrays: Arrays, dtypes: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Convert every array to a `Tensor`. Raises `WeightsError`; the error names the tensor.

    `dtypes`: tensor name -> dtype name, for arrays whose own dtype does not say it.
    """
    check_arrays(arrays)
    return {name: tensor_of(name, array, (dtypes or {}).get(name)) for name, array in arrays.items()}


def check_base(file: DeltaFile, old: Arrays) -> dict[str, Tensor]:
    """Check that `old` is the base that a delta was made from, and return it as tensors.

    Compares names, dtypes, shapes, and the checksum of every tensor. Raises `WeightsError` for a difference.
    """
    base = fit_base(file, old)
    for entry in file.entries:
        if entry.old_checksum is not None:
            _check_old(entry, checksum(base[entry.name].codes))
    return base


def fit_base(file: DeltaFile, old: Arrays) -> dict[str, Tensor]:
    """Check that `old` has the tensors that a delta was made from, and return these by name.

    Compares names, dtypes and shapes; reads no data yet. Raises `WeightsError` for a difference.
    """
    check_arrays(old)
    base: dict[str, Tensor] = {}
    for entry in file.entries:
        if entry.old is None:
            continue
        if entry.name not in old:
            raise wrong_base(f"it has no tensor {entry.name!r}", nearest(entry.name, old))
        base[entry.name] = _shaped(entry.name, old[entry.name], entry.old)
    extra = old.keys() - base.keys()
    if extra:
        raise wrong_base(f"it has a tensor {min(extra)!r} that is not in the delta")
    return base


def decode_tensors(file: DeltaFile, base: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Decode a delta file, and yield the coded tensors by name, one group (object of the file) at a time.

    Checksums of base and result are verified. Changed tensors are in new memory. Tensors without a change are not
    yielded. Raises `WeightsError`.
    """
    for entries, held, found in _checked_objects(file, base):
        yield {entry.name: apply_changes(old, one) for entry, old, one in zip(entries, held, found, strict=True)}


@dataclass(frozen=True)
class _Write:
    """A write into one buffer: a tensor's codes (unless the buffer is their memory already), then changes."""

    target: Codes
    whole: Codes
    changes: codec.Changes | None = None


def _put(writes: Sequence[_Write]) -> None:
    """Do all writes, full tensors first. Buffers that share memory are written once; their results are equal."""
    for one in writes:
        if one.target.ctypes.data != one.whole.ctypes.data:
            one.target[:] = one.whole
    write({_span(one.target): (one.target, one.changes) for one in writes if one.changes is not None}.values())


def _entry(name: str, old: Tensor | None, new: Tensor | None) -> Entry:
    before, after = _sums(old, new)
    same = old is not None and new is not None and before == after and same_bits(old, new)
    return Entry(name, old.spec if old else None, before, new.spec if new else None, after, same)


def _sums(old: Tensor | None, new: Tensor | codec.Changes | None) -> tuple[str | None, str | None]:
    """Return the checksums of a tensor before and after; in one pass if both have the same spec."""
    if old is not None and isinstance(new, codec.Changes):
        return checksums_before_after(old.codes, new)
    assert not isinstance(new, codec.Changes), "changes are of a tensor that is held"
    if old is not None and new is not None and old.spec == new.spec:
        return checksums(old.codes, new.codes)
    return checksum(old.codes) if old else None, checksum(new.codes) if new else None


def _pieces(
    head: bytes, before: Mapping[str, Tensor], after: Mapping[str, Tensor], groups: Sequence[Sequence[str]], mode: Mode
) -> Iterator[bytes]:
    yield head
    for names in groups:
        data = codec.encode([after[name] for name in names], [before.get(name) for name in names], mode)
        yield write_object_head(len(data), len(names))
        yield data


def _checked_changes(
    file: DeltaFile, base: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[Codes, codec.Changes | None]]]:
    """Yield base codes (or full new codes) and changes of each coded tensor."""
    for entries, held, found in _checked_objects(file, base):
        for entry, old, made in zip(entries, held, found, strict=True):
            if isinstance(made, Tensor):
                yield entry.name, (made.codes, None)
            elif old is not None:
                yield entry.name, (old.codes, made)


def _checked_objects(
    file: DeltaFile, base: Mapping[str, Tensor]
) -> Iterator[tuple[list[Entry], list[Tensor | None], list[codec.Changes | Tensor]]]:
    """Yield the entries, base tensors and changes of each object, after verifying the checksums of both sides."""
    coded = iter([entry for entry in file.entries if entry.coded])
    for count, data in file.objects:
        entries = [next(coded) for _ in range(count)]
        held = [base.get(entry.name) for entry in entries]
        with _of_this_base(entries, held):
            found = codec.changes(data, [entry.new for entry in entries if entry.new], held, in_order=False)
        _check(entries, [_sums(*pair) for pair in zip(held, found, strict=True)])
        yield entries, held, found


def _check_uncoded(file: DeltaFile, base: Mapping[str, Tensor]) -> None:
    for entry in file.entries:
        if entry.old is not None and not entry.coded:
            _check_old(entry, checksum(base[entry.name].codes))


@contextmanager
def _of_this_base(entries: Sequence[Entry], held: Sequence[Tensor | None]) -> Iterator[None]:
    """If decoding fails, check first whether the base is a different one: that error is more helpful."""
    try:
        yield
    except WeightsError:
        for entry, old in zip(entries, held, strict=True):
            if old is not None:
                _check_old(entry, checksum(old.codes))
        raise


def _check(entries: Sequence[Entry], sums: Sequence[tuple[str | None, str | None]]) -> None:
    """Verify checksums: the base first, since a wrong base gives a wrong target. Raises `WeightsError`."""
    for entry, (before, _) in zip(entries, sums, strict=True):
        if before is not None:
            _check_old(entry, before)
    for entry, (_, after) in zip(entries, sums, strict=True):
        if after != entry.new_checksum:
            raise damaged(f"{entry.name!r} became {str(after)[:12]}, not {str(entry.new_checksum)[:12]}")


def _check_old(entry: Entry, found: str) -> None:
    if found != entry.old_checksum:
        raise wrong_base(f"{entry.name!r} has checksum {found[:12]}, the delta is for {str(entry.old_checksum)[:12]}")


def _shaped(name: str, value: Any, spec: Spec) -> Tensor:
    """Convert a value of the base to the spec that the delta expects. A flat buffer may stand for any shape of its
    size."""
    tensor = tensor_of(name, value, None if isinstance(value, Tensor) else spec.dtype)
    if tensor.spec != spec and len(tensor.shape) == 1 and tensor.spec.size == spec.size and tensor.dtype == spec.dtype:
        tensor = Tensor(spec.dtype, spec.shape, tensor.codes)
    if tensor.spec != spec:
        raise wrong_base(f"{name!r} is {_spec_text(tensor.spec)}, the delta is for {_spec_text(spec)}")
    return tensor


def _place(name: str, spec: Spec | None, out: Mapping[str, Any]) -> Codes:
    """Return the memory of an output buffer as flat codes. Raises `WeightsError` if the tensor does not fit."""
    assert spec is not None
    if name not in out:
        raise WeightsError(
            f"out has no tensor {name!r}", f"the delta creates {_spec_text(spec)}", hint=nearest(name, out)
        )
    bits = bits_of(name, out[name])[0]
    codes = np.dtype(f"u{spec.num_bytes // spec.size}") if spec.size else bits.dtype
    if bits.ndim == 1 and bits.itemsize == 1 and bits.flags.c_contiguous and bits.nbytes == spec.num_bytes:
        bits = bits.view(codes)
    fits = bits.dtype == codes and (bits.shape == spec.shape or bits.shape == (spec.size,))
    native = getattr(getattr(out[name], "dtype", None), "isnative", True)  # for a foreign byte order, `bits` is a copy
    if not (fits and native and bits.flags.c_contiguous and bits.flags.writeable and bits.flags.aligned):
        raise WeightsError(
            f"out[{name!r}] cannot take the tensor",
            f"it is {bits.shape} of {bits.itemsize} bytes, the tensor {_spec_text(spec)}",
            hint="give a writable, contiguous buffer of the target's size",
        )
    return bits.reshape(-1)


def _refuse_overlaps(file: DeltaFile, base: Mapping[str, Tensor], places: Mapping[str, Codes]) -> None:
    """Raise `WeightsError` if output buffers overlap (unless they are the same memory with the same result), or if
    writing one would overwrite a base tensor that is read under another name."""
    sums = {entry.name: entry.new_checksum for entry in file.entries}
    spans = sorted((*_span(codes), name) for name, codes in places.items() if codes.size)
    for (start, stop, first), (after, end, second) in pairwise(spans):
        same = (start, stop, sums[first]) == (after, end, sums[second])
        if after < stop and not same:
            raise WeightsError(
                f"out[{first!r}] and out[{second!r}] are the same memory",
                f"their tensors differ: {str(sums[first])[:12]} and {str(sums[second])[:12]}",
                hint="give each of them its own buffer: in the target, they are different tensors",
            )
    starts = [start for start, _, _ in spans]
    for name in base.keys() & places.keys():
        start, stop = _span(base[name].codes)
        own = _span(places[name]) == (start, stop)
        near = _overlapping(spans, starts, start, stop)
        torn = next((other for a, b, other in near if not own or (a, b) != (start, stop)), None)
        if torn is not None:
            raise WeightsError(
                f"out[{torn!r}] is memory of the base's {name!r}",
                "which would be overwritten before it is read",
                hint="pass out=old, or separate buffers",
            )


def _overlapping(
    spans: Sequence[tuple[int, int, str]], starts: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, int, str]]:
    """Yield those of sorted spans, which are disjoint or identical, that share a byte with [start, stop)."""
    at = bisect_left(starts, stop)
    while start < stop and at and spans[at - 1][1] > start:
        at -= 1
        yield spans[at]


def _span(codes: Codes) -> tuple[int, int]:
    return codes.ctypes.data, codes.ctypes.data + codes.nbytes


def wrong_base(facts: str, more: str = "") -> WeightsError:
    """Create the error for a base that the delta was not made from.

    `facts`: what differs. `more` is appended to the hint of the error.
    """
    hint = "apply it to the version that it was made from; nothing was changed"
    return WeightsError("this delta is for another base", facts, hint=f"{hint}{'; ' + more if more else ''}")


def _spec_text(spec: Spec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _sorted(names: set[str]) -> list[str]:
    return sorted(names, key=str.encode)
