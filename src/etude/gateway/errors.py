"""Refusals: every error that leaves the gateway, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from starlette.responses import JSONResponse

from etude.errors import ContextFull, EngineError, EtudeError, nearest


class RequestRefused(Exception):
    """A refused request: the HTTP status and the error for the client."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, object]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {429: {"retry-after": "1"}, 503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}
        return JSONResponse(self.body(), self.status, headers.get(self.status))


def invalid_request(message: str, param: str | None = None) -> RequestRefused:
    """The refusal of an invalid request (HTTP 400). `param`: the field that is wrong."""
    return RequestRefused(400, message, code="invalid_request", param=param)


def unsupported_value(field: str, value: object, neutral: Sequence[object]) -> RequestRefused:
    """400: a field that would change the answer and is not honoured, in the three parts of our errors."""
    what = f"{field} = {json.dumps(value)[:100]} is not offered by this model"
    harmless = " or ".join(json.dumps(one) for one in neutral if one is not None) or "null"
    facts = f"the answer would be another than was asked for; only {harmless} leaves it as it is"
    return invalid_request(f"{what}: {facts}\n  hint: leave {field} out", field)


def unknown_parameter(field: str, known: Iterable[str]) -> RequestRefused:
    """The refusal of an unknown parameter (HTTP 400), with OpenAI's message and code."""
    close = nearest(field[:100], known)
    hint = close if close.startswith("did you mean") else "leave it out; the guide lists the supported ones"
    message = f"Unknown parameter: {field[:100]!r}.\n  hint: {hint}"
    return RequestRefused(400, message, code="unknown_parameter", param=field[:100])


def context_exceeded(context_tokens: int, prompt_tokens: int, answer_tokens: int) -> RequestRefused:
    """400: the conversation and the answer do not fit, in the words that clients know from OpenAI."""
    asked = prompt_tokens + answer_tokens
    message = (
        f"This model's maximum context length is {context_tokens} tokens. However, you requested {asked} tokens "
        f"({prompt_tokens} in the messages, {answer_tokens} in the completion). "
        "Please reduce the length of the messages or completion."
    )
    return RequestRefused(400, message, code="context_length_exceeded", param="messages")


def from_error(error: EtudeError) -> RequestRefused:
    """The refusal to send for an `EtudeError` that was raised while a request was served."""
    message = f"{error.what}{': ' + error.facts if error.facts else ''}"
    if isinstance(error, ContextFull):
        return RequestRefused(400, message, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineError):
        return RequestRefused(503, message, code="engine_unavailable")
    return invalid_request(message, "messages")
