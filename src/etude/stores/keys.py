"""Which keys a blob store accepts: relative posix paths that cannot leave the store on any filesystem."""

from __future__ import annotations

import re

from etude.errors import StoreError

MAX_KEY_CHARACTERS = 512
MAX_PART_CHARACTERS = 200
_PART = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9_=+@.-]*")


def check_key(key: str) -> str:
    """The key itself. Raises `StoreError` for anything that is not parts of letters, digits and ``_=+@.-``.

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
    """The prefix itself. Raises `StoreError` for one that no allowed key begins with.

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
    """Whether `check_prefix` takes it."""
    return is_key(prefix.removesuffix("/")) or prefix == ""


def is_key(key: str) -> bool:
    """Whether `check_key` takes it."""
    return len(key) <= MAX_KEY_CHARACTERS and all(
        len(part) <= MAX_PART_CHARACTERS and _PART.fullmatch(part) for part in key.split("/")
    )


def check_range(start: int, stop: int | None) -> None:
    """Raises `ValueError` for a byte range that counts from the end."""
    if start < 0 or (stop is not None and stop < start):
        raise ValueError(f"byte range [{start}, {stop}) is not allowed")
