"""Manifests and pointers: what a version contains, how to rebuild it, and how to verify it. Strict JSON of bounded
size.

A pointer names a manifest and its SHA-256. A manifest names its objects, its base and its parent in the same way. So
one trusted pointer verifies everything below it. `docs/formats/manifest.md` defines every field. Knows nothing of
stores.
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
"""Maximum of generations, serials and sweeps: exact in every JSON reader."""

MAX_NAME_BYTES = 512
MAX_HEADER_BYTES = 1 << 28

T = TypeVar("T", bound="Manifest | Pointer | LaterWays")
_SIGNATURE = b',"signature":"'
_HEX8, _HEX32, _HEX64 = (re.compile(f"[0-9a-f]{{{count}}}") for count in (8, 32, 64))


class Damaged(WeightsError):
    """Raised for bytes that are not a valid record of any version of etude."""


class Kind(enum.StrEnum):
    """Whether a version can be rebuilt without another version.

    ANCHOR: it has a full snapshot, perhaps also a delta. DELTA: it can only be rebuilt from the version before.
    """

    ANCHOR = "anchor"
    DELTA = "delta"


class Ref(msgspec.Struct, frozen=True):
    """A reference to a manifest: its version, its store key, and the SHA-256 (hex) of its bytes."""

    version: Version
    key: str
    sha256: str


class StoredObject(msgspec.Struct, frozen=True):
    """A stored file with encoded tensors, as a manifest lists it. The file never changes.

    The objects of one delta or snapshot (a `Way`) contain the tensors of the manifest's list in order; each object
    contains the next `num_tensors`. `num_bytes` and `sha256` (hex) are of the complete file, `header_bytes` and
    `header_sha256` of its header. The header contains digests of everything after it. So a reader of a part of the file
    can verify that part alone.
    """

    key: str
    num_bytes: int
    sha256: str
    header_bytes: int
    header_sha256: str
    num_tensors: int


class Way(msgspec.Struct, frozen=True):
    """One way to build a version: from the objects of a delta to version `base`, or, if `base` is None, from those of a
    full snapshot."""

    base: Ref | None
    objects: tuple[StoredObject, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all objects, in bytes."""
        return sum(o.num_bytes for o in self.objects)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a version, as its manifest lists it.

    `sha256`: its `tensor_digest`. `checksum`: a faster 128-bit sum (`delta.checksums`), 32 hex characters; empty if it
    was written before checksums were introduced.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    checksum: str = ""

    @property
    def spec(self) -> Spec:
        """The dtype and shape."""
        return Spec(self.dtype, self.shape)


class PublishMetrics(msgspec.Struct, frozen=True):
    """Measurements of the writer at one publish, for reports. Readers do not depend on them.

    `bound_bytes`: estimate of the smallest size that a delta of this change can have; the size of the snapshot if there
    is no delta. `changed_share`: share of elements that differ from the base; 1.0 if there is no base.
    """

    bound_bytes: float
    changed_share: float
    encode_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one published version: its tensors with their digests, and the ways to build it.

    `Channel.publish` writes it. `parent` is the version that these weights were trained from (None: the first). It is
    not always the version that the delta applies to (`base`): after a restart from an older checkpoint, the delta still
    applies to the version published last.

    `ways`: the delta from the version published before comes first; at most one is a full snapshot (anchor). `tensors`:
    sorted by name; in a sharded version, shard after shard. `rollout_ids`: all rollouts that the step was trained on.
    `nonce`: 32 random hex characters. `serial`: the serial of the base plus 1; 0 in old manifests. `generation`: the
    generation of the channel's pointer when the manifest was written. `signature`: Ed25519 over `manifest_text`, 128
    hex characters; empty if not signed. It must stay the last field.
    """

    format: int
    channel: str
    version: Version
    parent: Ref | None
    ways: tuple[Way, ...]
    tensors: tuple[TensorEntry, ...]
    rollout_ids: tuple[str, ...]
    facts: PublishMetrics
    nonce: str
    serial: int = 0
    generation: int = 0
    signature: str = ""

    @property
    def stem(self) -> str:
        """The part that all store keys of this version have in common: its name and 8 random characters."""
        return f"{self.version}-{self.nonce[:8]}"

    @property
    def kind(self) -> Kind:
        """ANCHOR if the version can be rebuilt without another version, else DELTA."""
        return Kind.DELTA if self.anchor is None else Kind.ANCHOR

    @property
    def anchor(self) -> Way | None:
        """The full snapshot; None if there is none."""
        return next((way for way in self.ways if way.base is None), None)

    @property
    def delta(self) -> Way | None:
        """The delta from the version published before; None if there is none."""
        return next((way for way in self.ways if way.base is not None), None)

    @property
    def base(self) -> Ref | None:
        """The version published before, which the delta applies to; None if there is no delta."""
        return self.delta.base if self.delta else None

    @property
    def snapshot_bytes(self) -> int:
        """Size of all tensors of the version, uncompressed, in bytes."""
        return sum(entry.spec.num_bytes for entry in self.tensors)


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The small stored record that names the newest version of a channel or a branch.

    Rewriting it is the commit of a publish.

    `head`: the reference to the manifest of that version. `nonce`: the manifest's nonce. If the store's answer is lost,
    the writer can tell by the nonce whether its own write succeeded. Readers accept a pointer only if the pair
    (`generation`, serial of the head) has not decreased. A publish raises the serial. The generation is raised only to
    move a pointer back on purpose, or to restore a lost pointer. `sweep`: raised by garbage collection, so that a
    publish that began before cannot commit. `signature`: Ed25519 over `signed_text`, 128 hex characters; empty if not
    signed.
    """

    format: int
    head: Ref
    nonce: str
    generation: int = 0
    sweep: int = 0
    signature: str = ""


class LaterWays(msgspec.Struct, frozen=True, kw_only=True):
    """The record of additional ways (deltas or a snapshot) to build a version, written after it was published.

    A `Compactor` writes it. The record is found by its key (`later_key`). The result of each way is verified by the
    digests in the manifest of the version.
    """

    format: int
    channel: str
    version: Version
    ways: tuple[Way, ...]


def table(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """Return the manifest's list of tensors for a set of tensors by name, sorted by name, with their digests.

    Raises `WeightsError` for a tensor name that is not allowed.
    """
    for name in tensors:
        if not _allowed_name(name):
            raise WeightsError(
                f"tensor name {name[:80]!r} is not allowed", hint="use 1 to 512 bytes of UTF-8 without NUL"
            )
    return tuple(
        TensorEntry(n, t.dtype, t.shape, tensor_digest(t), checksum(t.codes)) for n, t in sorted(tensors.items())
    )


def table_digest(entries: Sequence[TensorEntry]) -> str:
    """Return the digest of a version, which is the `content_digest` of its manifest's list of tensors."""
    return content_digest({entry.name: entry.sha256 for entry in entries})


def write_manifest(manifest: Manifest) -> tuple[Ref, bytes]:
    """Encode a manifest as JSON. Return the reference to it, and its bytes. Nothing is stored."""
    data = msgspec.json.encode(manifest)
    key = f"manifests/{manifest.channel}/{manifest.stem}.json"
    return Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), data


def manifest_text(data: bytes) -> tuple[bytes, str]:
    """Return the bytes that the signature of an encoded manifest covers, and the signature (hex).

    Both are empty if it is not signed. The covered bytes are a format line and everything before the signature field,
    which is the last one.
    """
    at = data.rfind(_SIGNATURE, -256)
    if at < 0 or not data.endswith(b'"}'):
        return b"", ""
    return b"etude manifest %d\n%b" % (FORMAT, data[:at]), data[at + len(_SIGNATURE) : -2].decode("ascii", "replace")


def read_manifest(data: bytes) -> Manifest:
    """Decode a manifest from untrusted bytes. Raises `WeightsError` unless every part of it is consistent."""
    manifest = _read("manifest", data, Manifest, MAX_MANIFEST_BYTES)
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise _damaged("manifest", str(error)) from None
    return manifest


def write_pointer(pointer: Pointer) -> bytes:
    """Encode a pointer as JSON. Nothing is stored."""
    return msgspec.json.encode(pointer)


def signed_text(key: str, pointer: Pointer) -> bytes:
    """Return the bytes that the signature of a pointer covers: the store key `key` and all fields of the pointer."""
    head = pointer.head
    lines = (f"etude pointer {FORMAT}", key, head.version, head.key, head.sha256, pointer.nonce)
    return "\n".join(map(str, (*lines, pointer.generation, pointer.sweep))).encode()


def read_pointer(data: bytes) -> Pointer:
    """Decode a pointer from untrusted bytes. Raises `Damaged`, or `WeightsError` for another format."""
    pointer = _read("pointer", data, Pointer, MAX_POINTER_BYTES)
    try:
        _check_ref(pointer.head)
        _require(0 <= pointer.generation <= MAX_COUNT and 0 <= pointer.sweep <= MAX_COUNT, "generation")
    except ValueError as error:
        raise _damaged("pointer", str(error)) from None
    return pointer


def later_key(manifest: Manifest) -> str:
    """Return the store key of the `LaterWays` of a version: deltas that were added after its publish."""
    return f"later/{manifest.channel}/{manifest.stem}.json"


def read_later(data: bytes, manifest: Manifest) -> LaterWays:
    """Decode the `LaterWays` (deltas added later) of the version of `manifest` from untrusted bytes.

    Raises `WeightsError` unless they are valid and of that version.
    """
    later = _read("list of later ways", data, LaterWays, MAX_LATER_BYTES)
    try:
        _require(later.version == manifest.version, f"it is of {later.version}, not of {manifest.version}")
        _check_ways(later.ways, len(manifest.tensors))
    except ValueError as error:
        raise _damaged("list of later ways", str(error)) from None
    return later


def _read(name: str, data: bytes, kind: type[T], limit: int) -> T:
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
    """The field that records of every format have."""

    format: int


def _check_format(name: str, found: int) -> None:
    if found != FORMAT:
        raise WeightsError(
            f"{name} has format {found}",
            f"this version of etude supports format {FORMAT}",
            hint="use the version of etude that wrote it",
        )


def _damaged(name: str, facts: str) -> Damaged:
    tools = {"pointer": "`etude weights repair RUN|STORE` sets the pointer again"}
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
