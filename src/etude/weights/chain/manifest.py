"""Manifests and pointers: what a version is, how to rebuild it, and what proves it. JSON, strict, of bounded size.

A pointer names a manifest and its SHA-256; a manifest names its objects, its base and its parent in the same way: one
trusted pointer proves everything below it. `docs/formats/manifest.md` has every field. Knows nothing of stores.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.weights.delta.checksums import checksum
from etude.weights.tensors import Spec, Tensor, content_digest, tensor_digest

FORMAT = 2
MAX_MANIFEST_BYTES = 32 << 20
MAX_POINTER_BYTES = 4096
MAX_LATER_BYTES = 32 << 20
MAX_COUNT = 1 << 53
"""Generations, serials and sweeps stay exact in every JSON reader."""

MAX_NAME_BYTES = 512
MAX_HEADER_BYTES = 1 << 28

T = TypeVar("T", bound="Manifest | Pointer | Later")
_SIGNATURE = b',"signature":"'
_HEX8, _HEX32, _HEX64 = (re.compile(f"[0-9a-f]{{{count}}}") for count in (8, 32, 64))


class Damaged(WeightsError):
    """Bytes that no writer of any etude wrote."""


class Kind(enum.StrEnum):
    """Whether a version can be rebuilt alone."""

    ANCHOR = "anchor"  # it holds a whole snapshot, perhaps a delta beside it
    DELTA = "delta"  # it needs its base


class Ref(msgspec.Struct, frozen=True):
    """A manifest by name and by content."""

    version: Version
    key: str
    sha256: str


class StoredObject(msgspec.Struct, frozen=True):
    """An immutable object: the next `num_tensors` of the manifest's table, as `docs/formats/delta.md` says.

    Its header has digests of all that follows, and one here: who reads a part proves it without the rest.
    """

    key: str
    num_bytes: int
    sha256: str
    header_bytes: int
    header_sha256: str
    num_tensors: int


class Way(msgspec.Struct, frozen=True):
    """One way to the version: the objects that lead to it from the version `base`. `base` None: a whole snapshot."""

    base: Ref | None
    objects: tuple[StoredObject, ...]

    @property
    def num_bytes(self) -> int:
        return sum(o.num_bytes for o in self.objects)


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the target."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str  # tensor_digest of the target's codes
    checksum: str = ""  # of the target's codes, 32 hex; empty: written before there were checksums

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, self.shape)


class Facts(msgspec.Struct, frozen=True):
    """Numbers that the writer measured, for reports. Readers do not depend on them."""

    bound_bytes: float  # weights.bound over the delta; the snapshot's bytes where there is none
    changed_share: float  # of elements whose code differs from the base's; 1.0 where there is none
    encode_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version. Made by `Channel.publish`, read by followers, the audit and `etude weights`.

    `parent` is the version these weights were trained from (None: the root), which is not always the base: after a
    restart from an older checkpoint the delta still applies to the version published last.
    """

    format: int
    channel: str
    version: Version
    parent: Ref | None
    ways: tuple[Way, ...]  # at most one without a base; the delta from the version published before comes first
    tensors: tuple[TensorEntry, ...]  # by name; of a sharded version shard after shard, each by name (`sharded`)
    rollout_ids: tuple[str, ...]  # every rollout the step consumed; trained means: listed in the current lineage
    facts: Facts
    nonce: str  # 32 hex characters, drawn for this manifest
    serial: int = 0  # the base's and one; 0: written before there were serials
    generation: int = 0  # of the pointer that the writer moved
    signature: str = ""  # Ed25519 over `manifest_text`, 128 hex characters; empty: not signed. The last field

    @property
    def stem(self) -> str:
        """A part of the keys of all objects that are stored for this manifest alone."""
        return f"{self.version}-{self.nonce[:8]}"

    @property
    def kind(self) -> Kind:
        return Kind.DELTA if self.anchor is None else Kind.ANCHOR

    @property
    def anchor(self) -> Way | None:
        """The way over nothing."""
        return next((way for way in self.ways if way.base is None), None)

    @property
    def delta(self) -> Way | None:
        """The way from the version published before."""
        return next((way for way in self.ways if way.base is not None), None)

    @property
    def base(self) -> Ref | None:
        """The version published before."""
        return self.delta.base if self.delta else None

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the whole target."""
        return sum(entry.spec.num_bytes for entry in self.tensors)


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The pointer of a channel or a branch: names its newest version. Moving it is the commit.

    Readers accept a pointer only if (generation, serial of the head) has not fallen. A publish raises the serial. The
    generation is raised only to move a pointer back on purpose, or to set it again after it was lost.
    """

    format: int
    head: Ref
    nonce: str  # the head manifest's, so that a writer whose answer got lost can see whether it won
    generation: int = 0
    sweep: int = 0  # raised by garbage collection before it deletes, so that no publish that began earlier commits
    signature: str = ""  # Ed25519 over `signed_text`, 128 hex characters; empty: not signed


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """Further ways to a version, found after it was published: deltas over several versions, perhaps an anchor.

    Nothing refers to it and nothing needs to: what a way gives is proven by the digests of the target's manifest.
    """

    format: int
    channel: str
    version: Version
    ways: tuple[Way, ...]


def table(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """The manifest's table of a set of tensors. Raises `WeightsError` for a name that no table may hold."""
    for name in tensors:
        if not _allowed_name(name):
            raise WeightsError(f"tensor name {name[:80]!r} is not allowed", hint="1 to 512 bytes of UTF-8, no NUL")
    return tuple(
        TensorEntry(n, t.dtype, t.shape, tensor_digest(t), checksum(t.codes)) for n, t in sorted(tensors.items())
    )


def table_digest(entries: Sequence[TensorEntry]) -> str:
    """`Version.digest` of a table."""
    return content_digest({entry.name: entry.sha256 for entry in entries})


def write_manifest(manifest: Manifest) -> tuple[Ref, bytes]:
    """The manifest's bytes and the reference to them."""
    data = msgspec.json.encode(manifest)
    key = f"manifests/{manifest.channel}/{manifest.stem}.json"
    return Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), data


def manifest_text(data: bytes) -> tuple[bytes, str]:
    """What a manifest's signature is over, and the signature: all bytes before that field, which is the last one.
    Empty where there is none."""
    at = data.rfind(_SIGNATURE, -256)
    if at < 0 or not data.endswith(b'"}'):
        return b"", ""
    return b"etude manifest %d\n%b" % (FORMAT, data[:at]), data[at + len(_SIGNATURE) : -2].decode("ascii", "replace")


def read_manifest(data: bytes) -> Manifest:
    """A manifest from outside bytes. Raises `WeightsError` unless every part of it is consistent."""
    manifest = _read(data, Manifest, MAX_MANIFEST_BYTES)
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise _damaged("manifest", str(error)) from None
    return manifest


def write_pointer(pointer: Pointer) -> bytes:
    return msgspec.json.encode(pointer)


def signed_text(key: str, pointer: Pointer) -> bytes:
    """The text that a pointer's signature covers: its key and all of its fields."""
    head = pointer.head
    lines = (f"etude pointer {FORMAT}", key, head.version, head.key, head.sha256, pointer.nonce)
    return "\n".join(map(str, (*lines, pointer.generation, pointer.sweep))).encode()


def read_pointer(data: bytes) -> Pointer:
    """A pointer from outside bytes. Raises `WeightsError`."""
    pointer = _read(data, Pointer, MAX_POINTER_BYTES)
    try:
        _check_ref(pointer.head)
        _require(0 <= pointer.generation <= MAX_COUNT and 0 <= pointer.sweep <= MAX_COUNT, "generation")
    except ValueError as error:
        raise _damaged("pointer", str(error)) from None
    return pointer


def later_key(manifest: Manifest) -> str:
    """Where a version's further ways are, if there are any."""
    return f"later/{manifest.channel}/{manifest.stem}.json"


def read_later(data: bytes, manifest: Manifest) -> Later:
    """Further ways to a manifest's version, from outside bytes. Raises `WeightsError`."""
    later = _read(data, Later, MAX_LATER_BYTES)
    try:
        _require(later.version == manifest.version, f"it is of {later.version}, not of {manifest.version}")
        _check_ways(later.ways, len(manifest.tensors))
    except ValueError as error:
        raise _damaged("later", str(error)) from None
    return later


def _read(data: bytes, kind: type[T], limit: int) -> T:
    name = kind.__name__.lower()
    if len(data) > limit:
        raise _damaged(name, f"it has more than {limit} bytes")
    try:
        record = msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        with suppress(ValueError, RecursionError):
            _check_format(name, msgspec.json.decode(data, type=_Marked).format)  # which may have other fields
        raise _damaged(name, str(error)) from None
    _check_format(name, record.format)
    return record


class _Marked(msgspec.Struct):
    """What a record of every format has."""

    format: int


def _check_format(name: str, found: int) -> None:
    if found != FORMAT:
        raise WeightsError(
            f"{name} has format {found}", f"this etude reads {FORMAT}", hint="use the etude that wrote it"
        )


def _damaged(name: str, facts: str) -> Damaged:
    tools = {"pointer": "`etude weights repair RUN|STORE` sets the pointer anew"}
    hint = tools.get(name, "see `etude weights verify RUN` or `etude weights fsck STORE`")
    return Damaged(f"{name} is damaged", facts, hint=hint)


def _check_manifest(manifest: Manifest) -> None:
    _require(bool(re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", manifest.channel)), "channel name")
    _check_version(manifest.version)
    _require(bool(re.fullmatch("[0-9a-f]{32}", manifest.nonce)), "nonce")
    names = [entry.name for entry in manifest.tensors]
    _require(len({*names}) == len(names), "a tensor is named twice")
    for entry in manifest.tensors:
        digests = _HEX64.fullmatch(entry.sha256) and (not entry.checksum or _HEX32.fullmatch(entry.checksum))
        _require(_allowed_name(entry.name) and bool(digests), f"tensor {entry.name[:80]!r}")
        _ = entry.spec  # raises for an unknown dtype or a wild shape
    _require(table_digest(manifest.tensors) == manifest.version.digest, "the version's digest is not the table's")
    if manifest.parent:
        _check_ref(manifest.parent)
    _require(0 <= manifest.serial <= MAX_COUNT and 0 <= manifest.generation <= MAX_COUNT, "serial")
    _require(len(manifest.ways) > 0 and sum(way.base is None for way in manifest.ways) <= 1, "ways")
    _check_ways(manifest.ways, len(names))


def _check_ways(ways: Sequence[Way], num_tensors: int) -> None:
    for way in ways:
        if way.base:
            _check_ref(way.base)
        _require(sum(o.num_tensors for o in way.objects) == num_tensors, "objects do not cover the tensors")
        for item in way.objects:
            _require(item.num_bytes >= 0 and item.num_tensors >= 0, f"object {item.key[:80]!r}")
            digests = (item.sha256, item.header_sha256)
            _require(all(map(_HEX64.fullmatch, digests)), f"object {item.key[:80]!r}")
            limit = min(item.num_bytes, MAX_HEADER_BYTES)
            _require(0 < item.header_bytes <= limit, f"the header of object {item.key[:80]!r}")


def _check_ref(ref: Ref) -> None:
    _check_version(ref.version)
    _require(bool(_HEX64.fullmatch(ref.sha256)), f"reference {ref.key[:80]!r}")


def _check_version(version: Version) -> None:
    shaped = version.step >= 0 and _HEX8.fullmatch(version.incarnation) and _HEX64.fullmatch(version.digest)
    _require(bool(shaped), "version")


def _allowed_name(name: str) -> bool:
    try:
        return 0 < len(name.encode()) <= MAX_NAME_BYTES and "\0" not in name
    except UnicodeEncodeError:
        return False


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
