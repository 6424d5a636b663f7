"""Signatures, with Ed25519: who holds the public key believes no other writer, wherever the bytes lay.

A pointer holds the SHA-256 of a manifest, which holds all that proves its tensors; so one signature of 64 bytes proves
a version. It is over the pointer's place, too: a signed pointer is not valid under another channel or branch. A
manifest's own signature is for whoever has to set a lost pointer anew (`ownership`). The arithmetic is the
`cryptography` library's, an extra: whoever signs nothing needs nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import msgspec

from etude.errors import InputError, WeightsError
from etude.weights.chain.manifest import Manifest, Pointer, manifest_text, signed_text, write_manifest, write_pointer

KEY_BYTES = 32
_HINT_KEY = "give the private key that signed it: --key FILE, or stores.signing_key of a run"


class Signer:
    """Signs with a private key: 32 bytes that `new_key` drew. Raises `WeightsError` without the library.

    >>> signer = Signer(bytes(32))
    >>> verified(signer.public_key, b"text", signer.sign(b"text"))
    True
    >>> verified(signer.public_key, b"other", signer.sign(b"text"))
    False
    """

    def __init__(self, private_key: bytes) -> None:
        _check_length(private_key, "private")
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        """32 bytes, for followers."""

    def sign(self, text: bytes) -> str:
        """128 hex characters."""
        return bytes(self._key.sign(text)).hex()


def read_signer(path: Path | None) -> Signer | None:
    """Who signs with the private key in a file, as `etude weights key FILE` writes it; None for no file. Raises
    `InputError`, which quotes nothing of the file, and `WeightsError` without the library."""
    if path is None:
        return None
    try:
        return Signer(bytes.fromhex(path.read_text("ascii").strip()))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read", str(error.strerror), hint="etude weights key FILE makes one"
        ) from None
    except ValueError:
        raise InputError(
            f"{path} holds no key", "64 hex characters are expected", hint="etude weights key FILE makes one"
        ) from None


def new_key() -> bytes:
    """A private key: 32 bytes from the system's randomness. Raises `WeightsError` without the library."""
    return bytes(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())


def require_library() -> None:
    """Raises `WeightsError` where there is no `cryptography`: to be asked before anything is made for a key."""
    _ed25519()


def verified(public_key: bytes, text: bytes, signature: str) -> bool:
    """Whether the key's owner signed the text. Any signature may be asked about. Raises `WeightsError`."""
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
    """A pointer's bytes for the place `key`, signed where there is a signer."""
    if signer is None:
        return write_pointer(pointer)
    signature = signer.sign(signed_text(key, pointer))
    return write_pointer(msgspec.structs.replace(pointer, signature=signature))


def signed(manifest: Manifest, signer: Signer | None) -> Manifest:
    """A manifest with its signature, where there is a signer."""
    if signer is None:
        return manifest
    text, _ = manifest_text(write_manifest(manifest)[1])
    return msgspec.structs.replace(manifest, signature=signer.sign(text))


def signed_by(public_key: bytes, data: bytes) -> bool:
    """Whether the key's owner signed a manifest, by its bytes."""
    text, signature = manifest_text(data)
    return verified(public_key, text, signature)


def check_signer(key: str, pointer: Pointer, signer: Signer | None) -> None:
    """Raises `WeightsError` where a pointer is signed and `signer` is not who signed it: whoever believes signatures
    would refuse what is written next."""
    if not pointer.signature:
        return
    named = f"it names {pointer.head.version}"
    if signer is None:
        raise WeightsError(f"{key} is signed", named, hint=_HINT_KEY)
    if not verified(signer.public_key, signed_text(key, pointer), pointer.signature):
        raise WeightsError(
            f"{key} is signed with another key than the one given",
            f"{named}; the public key of the one given is {signer.public_key.hex()}",
            hint=_HINT_KEY,
        )


def _check_length(key: bytes, kind: str) -> None:
    if len(key) != KEY_BYTES:
        raise WeightsError(
            f"a {kind} key has {KEY_BYTES} bytes", f"this one has {len(key)}", hint="an Ed25519 key, raw, not PEM"
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
