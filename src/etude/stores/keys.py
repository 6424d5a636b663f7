"""Validation of keys, prefixes and byte ranges. Keys are relative POSIX paths that cannot escape the store."""

from __future__ import annotations

import re

from etude.errors import StoreError

MAX_KEY_CHARACTERS = 512
MAX_PART_CHARACTERS = 200
_PART = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9_=+@.-]*")


def check_key(key: str) -> str:
    """Return the key if it is valid, else raise `StoreError`.

    A key has parts of letters, digits and ``_=+@.-``, separated by slashes. No part starts with a dot. A part has at
    most 200 characters, a key at most 512.

    >>> check_key("manifests/policy/v000001.json")
    'manifests/policy/v000001.json'
    >>> check_key("../secret")
    Traceback (most recent call last):
    etude.errors.StoreError: key '../secret' is not allowed
      hint: use letters, digits and _=+@.- between slashes; no part may start with a dot
    """
    if not is_key(key):
        raise StoreError(
            f"key {key[:80]!r} is not allowed",
            hint="use letters, digits and _=+@.- between slashes; no part may start with a dot",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if a valid key can start with it, else raise `StoreError`. A prefix can end within a part.

    >>> check_prefix(""), check_prefix("manifests/policy/v0")
    ('', 'manifests/policy/v0')
    >>> check_prefix("../../etc/")
    Traceback (most recent call last):
    etude.errors.StoreError: prefix '../../etc/' is not allowed
      hint: use the beginning of a key: letters, digits and _=+@.- between slashes
    """
    if not is_prefix(prefix):
        raise StoreError(
            f"prefix {prefix[:80]!r} is not allowed",
            hint="use the beginning of a key: letters, digits and _=+@.- between slashes",
        )
    return prefix


def is_prefix(prefix: str) -> bool:
    """Return whether a valid key can start with this prefix. `check_prefix` raises an error instead."""
    return is_key(prefix.removesuffix("/")) or prefix == ""


def is_key(key: str) -> bool:
    """Return whether a key is valid by the rules in `check_key`. `check_key` raises an error instead."""
    return len(key) <= MAX_KEY_CHARACTERS and all(
        len(part) <= MAX_PART_CHARACTERS and _PART.fullmatch(part) for part in key.split("/")
    )


def check_range(start: int, stop: int | None) -> None:
    """Raise `ValueError` for a byte range with a negative start, or a stop below the start."""
    if start < 0 or (stop is not None and stop < start):
        raise ValueError(f"byte range [{start}, {stop}) is not allowed")
