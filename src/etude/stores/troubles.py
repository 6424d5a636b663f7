"""What an object store's client says went wrong, read into what a caller can do about it.

The client's own text holds the request's URL, the server's answer, signatures and key ids: none of it goes into an
error of ours. Only the status, the server's error code and a few known phrases are read out of it. What obstore gives
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


_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def environment_hint(scheme: str) -> str:
    """What gives access."""
    return f"give {_ENVIRONMENT[scheme]} (or the machine's role) read and write access to the bucket"


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
_PHRASES = {  # in the client's text -> in ours; the first that is found
    "timed out": "no answer in time",
    "Connection refused": "connection refused",
    "dns error": "the host's name is unknown",
    "certificate": "the server's certificate is not trusted",
    "Connection reset": "the connection was cut",
    "connection closed": "the connection was cut",
    "IncompleteMessage": "the connection was cut",
    "decoding response body": "the answer was cut short",
    "tcp connect error": "no connection",
}


def read(error: Exception, scheme: str) -> Missing | Taken | Beyond | Trouble:
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
    facts = " ".join(filter(None, (f"HTTP {status}" if status else _phrase(text), code)))
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403) or _no_credentials(text):
        return Trouble(facts, _CODE_HINTS.get(code, environment_hint(scheme)), passing=False, undone=True)
    if status == 429 or code in _THROTTLED:
        return Trouble(facts, "the store asks for fewer requests: poll less often", passing=True, undone=True)
    if status is not None and status < 500 and status != 408:
        return Trouble(facts, _CODE_HINTS.get(code, "the store refuses this request"), passing=False, undone=True)
    return Trouble(facts, _reach(scheme), passing=True, undone=False)


def _reach(scheme: str) -> str:
    return {
        "s3": "see whether the store can be reached from here: AWS_ENDPOINT_URL, AWS_REGION, proxy, network",
        "gs": "see whether the store can be reached from here: proxy, network",
        "az": "see whether the store can be reached from here: AZURE_STORAGE_ENDPOINT, proxy, network",
    }[scheme]


def _no_credentials(text: str) -> bool:
    """Without any in the environment the client asks the machine's metadata service, and that is not there."""
    return "metadata" in text.lower() or "credential" in text.lower()


def _phrase(text: str) -> str:
    return next((ours for theirs, ours in _PHRASES.items() if theirs.lower() in text.lower()), "no usable answer")
