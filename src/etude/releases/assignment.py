"""Assigns subjects (users, or whatever a client names) to the stable or the canary version of a release.

A keyed hash places each subject at a fixed point between 0 and 1; those below the canary's share get the canary. So a
subject always gets the same version, a growing share moves no subject back, and no list of subjects is stored. The key
is the release's salt: subjects that had one canary are not more likely than others to have the next one.
"""

from __future__ import annotations

import enum
import hashlib

from etude.errors import InputError

SALT_BYTES = 16
"""The size of a release's salt in bytes."""
MAX_AGE_S = 0.2
"""How old the share may be by which a request is routed, in seconds. A rollback reaches all requests after that."""
MAX_SUBJECT_BYTES = 1024
"""The longest name of a subject, in bytes of UTF-8."""


class Arm(enum.StrEnum):
    """The two versions between which a release divides its subjects."""

    STABLE = "stable"
    CANARY = "canary"


def place_of(salt: bytes, subject: str) -> int:
    """Return a number from 0 to 2^64 - 1 that is computed from a salt and a subject, and so never changes.

    Raises `InputError` for an empty subject, since all requests without a subject would get the same version, and for
    one that is too long.

    >>> place_of(b"a" * 16, "user-1") == place_of(b"a" * 16, "user-1") != place_of(b"b" * 16, "user-1")
    True
    """
    named = subject.encode("utf-8", "surrogatepass")
    if not 0 < len(named) <= MAX_SUBJECT_BYTES:
        raise InputError(
            f"a subject of {len(named)} bytes cannot be assigned",
            f"a subject has 1 to {MAX_SUBJECT_BYTES} bytes",
            hint="send a stable identifier of the user",
        )
    return int.from_bytes(hashlib.blake2b(named, key=salt, digest_size=8, person=b"etude place").digest(), "big")


def arm_of(salt: bytes, subject: str, share: int) -> Arm:
    """Return the version that a subject gets while `share` percent of the subjects get the canary.

    Raises `InputError` if the subject is empty or too long.

    >>> arm_of(b"a" * 16, "user-1", 0), arm_of(b"a" * 16, "user-1", 100)
    (<Arm.STABLE: 'stable'>, <Arm.CANARY: 'canary'>)
    """
    return Arm.CANARY if place_of(salt, subject) * 100 < share << 64 else Arm.STABLE


def pseudonym(salt: bytes, subject: str) -> bytes:
    """Return 16 bytes that stand for a subject in a release's records, from which its name cannot be computed.

    Raises `InputError` if the subject is empty or too long."""
    place_of(salt, subject)
    named = subject.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(named, key=salt, digest_size=16, person=b"etude subject").digest()
