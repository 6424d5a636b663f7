"""The keys of subjects: one file each, in a folder of their own, so that backups can leave them out.

A key is 32 random bytes for AES-256-GCM. Destroying it overwrites its file before it is deleted. Solid-state disks,
copy-on-write filesystems and backups may keep old blocks all the same."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etude.errors import DeadlineExceeded, PrivacyError
from etude.privacy.subjects import Subject, SubjectDigests, digests

_ID_BYTES, _KEY_BYTES, _CHECK_BYTES = 16, 32, 8
_NONCE_BYTES = 12
_POLL_S = 0.02


class Key(NamedTuple):
    """A subject's key: its id (32 hex characters) and its 32 secret bytes."""

    id: str
    secret: bytes

    def encrypt(self, data: bytes, beside: bytes) -> bytes:
        """Encrypt data with AES-256-GCM. Returns 12 random bytes (the nonce), followed by the ciphertext.

        `beside` is authenticated, but not stored: `decrypt` needs the same bytes. Raises `ModuleNotFoundError` without
        the library `cryptography`."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + AESGCM(self.secret).encrypt(nonce, data, beside)

    def decrypt(self, data: bytes, beside: bytes) -> bytes:
        """Decrypt what `encrypt` returned. Raises `ValueError` if `data` or `beside` were changed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            return AESGCM(self.secret).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], beside)
        except InvalidTag:
            raise ValueError("its bytes or its columns were changed") from None


class KeyStore:
    """The folder with one encryption key per subject. It also has a random secret, from which the names of the key
    files are computed (`names`).

    With `create`, a missing folder or secret is created. Otherwise nothing is created, and a missing secret raises
    `PrivacyError`: with a new secret, the data of all subjects could no longer be found."""

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        self.folder = folder
        path = folder / "secret"
        if not path.exists():
            if not create:
                facts = "digests of subjects and ids of responses are computed with it"
                hint = f"copy the original's folder of keys to {folder}: etude backup leaves it out without --with-keys"
                raise PrivacyError(f"{path} is missing", facts, hint=hint)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path, secrets.token_bytes(32))
        self._secret = path.read_bytes()
        if len(self._secret) != 32:
            raise PrivacyError(
                f"{path} is damaged", f"{len(self._secret)} bytes, not 32", hint="restore the file from a backup"
            )

    @property
    def fingerprint(self) -> str:
        """A digest of the secret, 32 hex characters."""
        return hashlib.sha256(b"etude.privacy.secret\0" + self._secret).hexdigest()[:32]

    def derive(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes for another purpose, computed from that of the store."""
        return hmac.digest(self._secret, purpose.encode(), "sha256")

    def names(self, subject: Subject) -> SubjectDigests:
        """Return the digests that stand for a subject in file names and databases."""
        return digests(self._secret, subject)

    def find(self, names: SubjectDigests) -> Key | None:
        """Return a subject's key; None if it has none. Raises `PrivacyError` for a damaged file."""
        path = self._path(names)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if not any(data):  # `destroy` was killed before it deleted the file
            return None
        body = data[:-_CHECK_BYTES]
        if len(data) != _ID_BYTES + _KEY_BYTES + _CHECK_BYTES or data[-_CHECK_BYTES:] != _check(body):
            hint = "restore the file from a backup, or erase the subject"
            raise PrivacyError(f"the key {path} is damaged", f"{len(data)} bytes", hint=hint)
        return Key(body[:_ID_BYTES].hex(), body[_ID_BYTES:])

    def find_or_create(self, names: SubjectDigests) -> Key:
        """Return a subject's key. Creates one if there is none.

        The caller must hold `lock`, so that no erasure happens before the key is used."""
        found = self.find(names)
        if found is None:
            path = self._path(names)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.unlink(missing_ok=True)
            body = secrets.token_bytes(_ID_BYTES + _KEY_BYTES)
            _create(path, body + _check(body))
            found = self.find(names)
            assert found is not None, "it was just created"
        return found

    def destroy(self, names: SubjectDigests) -> int:
        """Destroy a subject's key; for an organisation those of all its users too. Returns the number of destroyed
        keys.

        Needs no free disk space."""
        folder = self.folder / names.organisation
        if not folder.is_dir():
            return 0
        found = sorted(folder.iterdir()) if names.is_organisation else [self._path(names)]
        number = 0
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                with path.open("r+b", buffering=0) as file:
                    file.write(bytes(os.fstat(file.fileno()).st_size))
                    os.fsync(file.fileno())
                path.unlink()
                number += not path.name.startswith(".")  # what a killed `_create` left is the key of nothing
        _sync_folder(folder)
        return number

    @contextlib.contextmanager
    def lock(self, deadline_s: float = 30.0) -> Iterator[None]:
        """Hold the store against other processes: capture while it writes, erasure while it erases, a change of consent
        while it is stored, and training from its last look at consent until its version is published.

        Raises `DeadlineExceeded` when it is not free within `deadline_s` seconds."""
        end = time.monotonic() + deadline_s
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        what = f"the lock of the keys in {self.folder} was not free within {deadline_s:g} s"
                        hint = "another process captures, erases or publishes; try again"
                        raise DeadlineExceeded(what, hint=hint) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _path(self, names: SubjectDigests) -> Path:
        return self.folder / names.organisation / names.subject


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]


def _create(path: Path, data: bytes) -> None:
    """Write a file all or nothing, durably; one that another process wrote first stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
