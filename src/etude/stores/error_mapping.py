"""Maps exceptions of the object store client (obstore) to outcomes that the caller can act on.

The client's error text contains the request URL, the server's response, signatures and key ids, so it is never quoted.
Only the HTTP status, the server's error code and a few known words are taken from it. Where obstore has no exception
class for an error, status and code decide."""

from __future__ import annotations

import re
from dataclasses import dataclass

from etude.errors import StoreError


class NotFound(Exception):
    """Raised when the object does not exist."""


class ConditionFailed(Exception):
    """Raised when the condition of a write failed: the object exists, has changed, or is being written."""


class RangeBeyondEnd(Exception):
    """Raised when the byte range starts at or after the object's end."""


class WrongLength(Exception):
    """Raised when the response has fewer or more bytes than requested."""


@dataclass(frozen=True)
class Failure:
    """The description of a failed request, for failures other than `NotFound`, `ConditionFailed` and `RangeBeyondEnd`.
    `classify` makes one.

    - `facts`, `hint`: the texts of the `StoreError` to raise.
    - `retryable`: another attempt can succeed.
    - `not_executed`: the server says that it did not execute the request."""

    facts: str
    hint: str
    retryable: bool
    not_executed: bool

    def error(self, what: str, also: str = "") -> StoreError:
        """Return the exception to raise for this failure.

        `what` names the failed request and begins the message. `also` is appended to `facts`."""
        return StoreError(what, f"{self.facts}{'; ' if also else ''}{also}", hint=self.hint)


Outcome = NotFound | ConditionFailed | RangeBeyondEnd | Failure  # the outcomes of a request without a result

_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_THROTTLED = {"SlowDown", "ServerBusy", "TooManyRequests"}
_CODE_HINTS = {
    "RequestTimeTooSkewed": "set the clock of this machine: the store refuses requests that are 15 minutes off",
    "ExpiredToken": "the session token has expired: get a new one and start again",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION to it",
    "EntityTooLarge": "the store takes no object of this size: split it",
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_METADATA = re.compile(
    r"Error performing (?:token request|(?:GET|PUT) http://[^/\s]+/(?:latest/(?:api/token|meta-data)|computeMetadata))"
)
_KNOWN_CAUSES = {  # word in the client's text of an error without a status -> our text; the first match counts
    "TimedOut": "no response in time",
    "ConnectionRefused": "connection refused",
    "IncompleteBody": "the response was cut short",
    "IncompleteMessage": "the connection was cut",
    "ConnectionReset": "the connection was cut",
    "BrokenPipe": "the connection was cut",
    "UnexpectedRange": "the response has another range than requested",
    "dns error": "the host name is unknown",
    "certificate": "the server's certificate is not trusted",
}


def environment_hint(scheme: str) -> str:
    """Return the hint that names the environment variables which give access to a bucket. `scheme`: s3, gs or az."""
    return f"give {_ENVIRONMENT[scheme]} (or the machine's role) read and write access to the bucket"


def classify(error: Exception, scheme: str) -> Outcome:
    """Map an exception of the client to an outcome. `scheme` is "s3", "gs" or "az", and chooses the hint."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    kind = type(error).__name__
    if code in _NO_BUCKET:
        return Failure(code, "create the bucket, or correct its name", retryable=False, not_executed=True)
    if isinstance(error, FileNotFoundError):
        return NotFound()
    if kind in ("AlreadyExistsError", "PreconditionError") or status in (409, 412):
        return ConditionFailed()
    if status == 416:
        return RangeBeyondEnd()
    if isinstance(error, WrongLength):
        return Failure(str(error), "check for a proxy that changes responses", retryable=True, not_executed=False)
    if _METADATA.search(text):  # the client asks for it when the environment has no credentials
        return Failure("no credentials", environment_hint(scheme), retryable=False, not_executed=True)
    facts = " ".join(filter(None, (f"HTTP {status}" if status else _cause(text), code)))
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Failure(facts, _CODE_HINTS.get(code, environment_hint(scheme)), retryable=False, not_executed=True)
    if status == 429 or code in _THROTTLED:
        return Failure(facts, "the store asks for fewer requests: poll less often", retryable=True, not_executed=True)
    if status is not None and status < 500 and status != 408:
        return Failure(
            facts, _CODE_HINTS.get(code, "the store refuses this request"), retryable=False, not_executed=True
        )
    return Failure(facts, _reach(scheme), retryable=True, not_executed=False)


def unexpected(outcome: NotFound | ConditionFailed | RangeBeyondEnd) -> Failure:
    """Return the failure for an outcome that the request that was sent cannot have, such as `NotFound` for a write."""
    text = {NotFound: "not found", ConditionFailed: "a condition failed", RangeBeyondEnd: "no such range"}[
        type(outcome)
    ]
    return Failure(f"the store answers {text!r}", "check that the bucket exists", retryable=False, not_executed=True)


def _reach(scheme: str) -> str:
    return {
        "s3": "check that the store can be reached from this machine: AWS_ENDPOINT_URL, AWS_REGION, proxy, network",
        "gs": "check that the store can be reached from this machine: proxy, network",
        "az": "check that the store can be reached from this machine: AZURE_STORAGE_ENDPOINT, proxy, network",
    }[scheme]


def _cause(text: str) -> str:
    return next((cause for word, cause in _KNOWN_CAUSES.items() if word in text), "no usable response")
