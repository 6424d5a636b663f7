"""What an object store's client says went wrong, read into what a caller can do about it.

The client's own text holds the request's URL, the server's answer, signatures and key ids: none of it goes into an
error of ours. Only the status, the server's error code and a few known words are read out of it. What obstore gives
no class of its own is told apart by status and code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from etude.errors import StoreError


class Missing(Exception):
    """There is no such object."""


class Taken(Exception):
    """A condition did not hold: the object is there already, or has changed, or somebody writes it at this moment."""


class Beyond(Exception):
    """The range begins at or after the object's end."""


class Short(Exception):
    """An answer has fewer bytes than the object, or more."""


@dataclass(frozen=True)
class Trouble:
    """A request that got no answer that a store can work with."""

    facts: str
    hint: str
    passing: bool  # another attempt may well succeed
    undone: bool  # the server says that it did nothing

    def error(self, what: str, also: str = "") -> StoreError:
        return StoreError(what, f"{self.facts}{'; ' if also else ''}{also}", hint=self.hint)


Answer = Missing | Taken | Beyond | Trouble  # of a request that brought nothing

_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_THROTTLED = {"SlowDown", "ServerBusy", "TooManyRequests"}
_CODE_HINTS = {
    "RequestTimeTooSkewed": "set this machine's clock: the store takes no request that is 15 minutes off",
    "ExpiredToken": "the session token is over: get another and start again",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION to it",
    "EntityTooLarge": "the store takes no object of this size: cut it into smaller ones",
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_METADATA = re.compile(
    r"Error performing (?:token request|(?:GET|PUT) http://[^/\s]+/(?:latest/(?:api/token|meta-data)|computeMetadata))"
)
_WORDS = {  # in the client's description of an error without a status -> ours; the first that is found
    "TimedOut": "no answer in time",
    "ConnectionRefused": "connection refused",
    "IncompleteBody": "the answer was cut short",
    "IncompleteMessage": "the connection was cut",
    "ConnectionReset": "the connection was cut",
    "BrokenPipe": "the connection was cut",
    "UnexpectedRange": "another range came than was asked for",
    "dns error": "the host's name is unknown",
    "certificate": "the server's certificate is not trusted",
}


def environment_hint(scheme: str) -> str:
    """What gives access."""
    return f"give {_ENVIRONMENT[scheme]} (or the machine's role) read and write access to the bucket"


def read(error: Exception, scheme: str) -> Answer:
    """What the client's exception means."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    kind = type(error).__name__
    if code in _NO_BUCKET:
        return Trouble(code, "create the bucket, or correct its name", passing=False, undone=True)
    if isinstance(error, FileNotFoundError):
        return Missing()
    if kind in ("AlreadyExistsError", "PreconditionError") or status in (409, 412):
        return Taken()
    if status == 416:
        return Beyond()
    if isinstance(error, Short):
        return Trouble(str(error), "something on the way changes answers: a proxy?", passing=True, undone=False)
    if _METADATA.search(text):  # which is asked when the environment holds no credentials
        return Trouble("no credentials", environment_hint(scheme), passing=False, undone=True)
    facts = " ".join(filter(None, (f"HTTP {status}" if status else _word(text), code)))
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Trouble(facts, _CODE_HINTS.get(code, environment_hint(scheme)), passing=False, undone=True)
    if status == 429 or code in _THROTTLED:
        return Trouble(facts, "the store asks for fewer requests: poll less often", passing=True, undone=True)
    if status is not None and status < 500 and status != 408:
        return Trouble(facts, _CODE_HINTS.get(code, "the store refuses this request"), passing=False, undone=True)
    return Trouble(facts, _reach(scheme), passing=True, undone=False)


def misplaced(answer: Missing | Taken | Beyond) -> Trouble:
    """An answer that the question has no place for."""
    said = {Missing: "not found", Taken: "a condition does not hold", Beyond: "no such range"}[type(answer)]
    return Trouble(f"the store says {said!r}", "see whether the bucket is there", passing=False, undone=True)


def _reach(scheme: str) -> str:
    return {
        "s3": "see whether the store can be reached from here: AWS_ENDPOINT_URL, AWS_REGION, proxy, network",
        "gs": "see whether the store can be reached from here: proxy, network",
        "az": "see whether the store can be reached from here: AZURE_STORAGE_ENDPOINT, proxy, network",
    }[scheme]


def _word(text: str) -> str:
    return next((ours for theirs, ours in _WORDS.items() if theirs in text), "no usable answer")
