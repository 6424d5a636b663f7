"""Ed25519 signatures of versions: a reader with the public key accepts only what the owner of the private key
published, wherever the bytes are stored.

A pointer contains the SHA-256 of a manifest, which contains the digests of all its tensors; so one signature of 64
bytes authenticates a version. It covers the key of the pointer too: a signed pointer is not valid in another channel or
branch. Manifests are signed as well, so that a lost pointer can be restored (`ownership`). The optional library
`cryptography` is needed only to sign or to check signatures.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import msgspec

from etude.errors import InputError, WeightsError
from etude.weights.chain.manifest import Manifest, Pointer, manifest_text, signed_text, write_manifest, write_pointer

KEY_BYTES = 32
_HINT_KEY = "give the signer's private key: --key FILE, or stores.signing_key of a run"


class Signer:
    """Signs with an Ed25519 private key (32 bytes, from `new_key`).

    Raises `WeightsError` without the library `cryptography`, or for a key of another length.

    >>> signer = Signer(bytes(32))
    >>> verify_signature(signer.public_key, b"text", signer.sign(b"text"))
    True
    >>> verify_signature(signer.public_key, b"other", signer.sign(b"text"))
    False
    """

    def __init__(self, private_key: bytes) -> None:
        _check_length(private_key, "private")
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        """The public key (32 bytes) with which followers check signatures."""

    def sign(self, text: bytes) -> str:
        """Sign a text. Return the signature as 128 hex characters."""
        return bytes(self._key.sign(text)).hex()


def read_signer(path: Path | None) -> Signer | None:
    """Create a signer from a key file that `etude weights key FILE` wrote; None if `path` is None.

    Raises `InputError`, which never quotes the content of the file, and `WeightsError` without the library
    `cryptography`.
    """
    if path is None:
        return None
    try:
        return Signer(bytes.fromhex(path.read_text("ascii").strip()))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read", str(error.strerror), hint="create a key file with: etude weights key FILE"
        ) from None
    except ValueError:
        raise InputError(
            f"{path} does not contain a key",
            "64 hex characters are expected",
            hint="create a key file with: etude weights key FILE",
        ) from None


def new_key() -> bytes:
    """Generate an Ed25519 private key: 32 random bytes. Raises `WeightsError` without the library `cryptography`."""
    return bytes(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())


def require_library() -> None:
    """Raise `WeightsError` if `cryptography` is not installed."""
    _ed25519()


def verify_signature(public_key: bytes, text: bytes, signature: str) -> bool:
    """Return whether `signature` (hex) is a valid Ed25519 signature of `text` by the owner of `public_key` (32 bytes).

    A string of another form is not valid. Raises `WeightsError` for a key of the wrong length, or without the library
    `cryptography`.
    """
    _check_length(public_key, "public")
    from_bytes = _ed25519().Ed25519PublicKey.from_public_bytes
    if not re.fullmatch("[0-9a-f]{128}", signature):
        return False
    try:
        from_bytes(public_key).verify(bytes.fromhex(signature), text)
    except _invalid_signature():
        return False
    return True


def write_signed(key: str, pointer: Pointer, signer: Signer | None) -> bytes:
    """Encode a pointer as the bytes to store under `key`, signed unless `signer` is None. Nothing is stored."""
    if signer is None:
        return write_pointer(pointer)
    signature = signer.sign(signed_text(key, pointer))
    return write_pointer(msgspec.structs.replace(pointer, signature=signature))


def sign_manifest(manifest: Manifest, signer: Signer | None) -> Manifest:
    """Return the manifest with a signature; unchanged if `signer` is None."""
    if signer is None:
        return manifest
    text, _ = manifest_text(write_manifest(manifest)[1])
    return msgspec.structs.replace(manifest, signature=signer.sign(text))


def is_signed_by(public_key: bytes, data: bytes) -> bool:
    """Return whether the owner of `public_key` (32 bytes) signed the manifest that `data` encodes."""
    text, signature = manifest_text(data)
    return verify_signature(public_key, text, signature)


def check_signer(key: str, pointer: Pointer, signer: Signer | None) -> None:
    """Raise `WeightsError` unless `signer` may replace `pointer`, which is stored under `key`.

    An unsigned pointer may be replaced by anyone. A signed one only with the same key, since readers that check
    signatures would reject the new one.
    """
    if not pointer.signature:
        return
    named = f"it names {pointer.head.version}"
    if signer is None:
        raise WeightsError(f"{key} is signed", named, hint=_HINT_KEY)
    if not verify_signature(signer.public_key, signed_text(key, pointer), pointer.signature):
        raise WeightsError(
            f"{key} is signed with another key than the one given",
            f"{named}; the public key of the one given is {signer.public_key.hex()}",
            hint=_HINT_KEY,
        )


def _check_length(key: bytes, kind: str) -> None:
    if len(key) != KEY_BYTES:
        raise WeightsError(
            f"a {kind} key has {KEY_BYTES} bytes", f"this one has {len(key)}", hint="give a raw Ed25519 key, not PEM"
        )


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise WeightsError(
            "signatures need the library cryptography", "it is not installed", hint="pip install 'etude[signing]'"
        ) from None
    return ed25519


def _invalid_signature() -> type[Exception]:
    from cryptography.exceptions import InvalidSignature

    return InvalidSignature
