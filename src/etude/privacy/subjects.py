"""Whose data it is: an organisation, or one of its users; and the names by which files know them."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from etude.errors import InputError

MAX_CHARS = 256


class Subject(NamedTuple):
    """An organisation (an API key of the gateway), or one of its users. Make it by `of` or `parse`."""

    organisation: str
    user: str = ""

    @classmethod
    def of(cls, organisation: str, user: str = "") -> Subject:
        """Check the names and return the subject. Raises `InputError` for an invalid name."""
        if not organisation or "/" in organisation:
            hint = "write ORGANISATION, or ORGANISATION/USER"
            raise InputError(f"{organisation[:80]!r} is not the name of an organisation", hint=hint)
        for name in (organisation, user):
            if len(name) > MAX_CHARS or not (name.isprintable() or not name):
                facts = f"it has {len(name)} characters"
                hint = f"a name has at most {MAX_CHARS} characters, all of them printable"
                raise InputError(f"{name[:80]!r} is not the name of a subject", facts, hint=hint)
        return cls(organisation, user)

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Parse ``ORGANISATION`` or ``ORGANISATION/USER``. Raises `InputError` for an invalid name.

        >>> Subject.parse("acme/bob@example.org")
        Subject(organisation='acme', user='bob@example.org')
        """
        organisation, slash, user = text.partition("/")
        if slash and not user:
            raise InputError(f"{text[:80]!r} names no user", hint="leave out the slash to name the organisation")
        return cls.of(organisation, user)

    def __str__(self) -> str:
        return f"{self.organisation}/{self.user}" if self.user else self.organisation


class SubjectDigests(NamedTuple):
    """The digests that stand for a subject in files: one of the organisation and one of the subject, 32 hex characters
    each.

    They are keyed with the secret of the key store, so they cannot be computed from a name without it."""

    organisation: str
    subject: str

    @property
    def is_organisation(self) -> bool:
        """Whether the subject is the organisation itself."""
        return self.organisation == self.subject


def digests(secret: bytes, subject: Subject) -> SubjectDigests:
    """Return the digests of a subject under a secret of 32 bytes.

    >>> acme, bob = digests(bytes(32), Subject("acme")), digests(bytes(32), Subject("acme", "bob"))
    >>> acme.is_organisation, bob.is_organisation, bob.organisation == acme.organisation
    (True, False, True)
    """

    def one(*names: str) -> str:
        text = "\0".join(names).encode("utf-8", "surrogatepass")
        return hmac.new(secret, text, hashlib.sha256).hexdigest()[:32]

    organisation = one(subject.organisation)
    return SubjectDigests(organisation, one(*subject) if subject.user else organisation)
