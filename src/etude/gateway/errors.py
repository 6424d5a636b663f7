"""The errors with which the gateway refuses requests. A dialect writes them in its own format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from etude.errors import ContextFull, EngineError, EtudeError, MalformedRequest, nearest


class RequestRefused(EtudeError):
    """Raised to refuse a request. It has the HTTP status and the error that the client gets.

    - `what`, `facts`, `hint`: the three parts of `message`, the text that the client gets.
    - `code` and `param`: fields of OpenAI's error object; `param` names the invalid request field.
    - `context`: (tokens of the prompt and of the requested answer, maximum of the model) if the context is full, else
      None.
    - `retry_s`: seconds after which the client may try again, for status 429 and 503.
    - `allow`: the methods that the path supports, for status 405."""

    def __init__(
        self,
        status: int,
        what: str,
        facts: str = "",
        *,
        hint: str,
        code: str,
        param: str | None = None,
        context: tuple[int, int] | None = None,
        retry_s: float = 1.0,
        allow: str = "",
    ) -> None:
        super().__init__(what, facts, hint=hint)
        self.status, self.message, self.code, self.param = status, str(self), code, param
        self.context, self.retry_s, self.allow = context, retry_s, allow

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the HTTP response: retry-after (status 429 and 503), allow (405), www-authenticate (401)."""
        if self.status == 405:
            return {"allow": self.allow}
        if self.status in (429, 503):
            return {"retry-after": str(math.ceil(self.retry_s))}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def stopping() -> RequestRefused:
    """Return the error of a request that arrives, or runs, while the gateway stops (HTTP 503)."""
    hint = "try again in a few seconds"
    return RequestRefused(503, "the gateway is stopping", hint=hint, code="engine_unavailable", retry_s=5)


def broken() -> RequestRefused:
    """Return the error of a request that failed because of a bug in the gateway (HTTP 500)."""
    hint = "send the request again; if it fails again, see the gateway's log, which has the traceback"
    return RequestRefused(500, "the gateway failed", hint=hint, code="internal_error")


def cancelled(engine: str) -> RequestRefused:
    """Return the error of a request that an engine cancelled (HTTP 503)."""
    hint = "send the request again"
    return RequestRefused(503, f"{engine} cancelled the request", hint=hint, code="engine_unavailable")


def openai_error(refused: RequestRefused) -> dict[str, object]:
    """Return the JSON body of an error: ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def invalid_request(what: str, facts: str = "", *, hint: str, param: str | None = None) -> RequestRefused:
    """Return the error of an invalid request (HTTP 400). `param` names the invalid request field."""
    return RequestRefused(400, what, facts, hint=hint, code="invalid_request", param=param)


def invalid_tools(error: ValueError) -> RequestRefused:
    """Return the error of tools without a name or in an invalid form (HTTP 400). `error` says what is wrong."""
    hint = "send each tool as the API has it, with a name of letters, digits, _ and -"
    return invalid_request("a tool is invalid", str(error), hint=hint, param="tools")


def not_json(error: Exception) -> RequestRefused:
    """Return the error of a body that cannot be parsed (HTTP 400)."""
    hint = "send one JSON value in UTF-8, as a JSON library writes it"
    return invalid_request("the body is not JSON", str(error), hint=hint)


def unsupported_content(kind: str, where: str, offered: str) -> RequestRefused:
    """Return the error of a part of a message that is not text, such as an image (HTTP 400).

    `kind`: its type. `where`: its place in the body. `offered`: the type of text parts in this API."""
    what = f"content of type {kind[:100]!r} is not supported by this model"
    return invalid_request(what, "it reads only text", hint=f"send content of type {offered}", param=where)


def unsupported_value(field: str, value: object, neutral: Sequence[object]) -> RequestRefused:
    """Return the error of a request field with an unsupported value (HTTP 400). `neutral`: the accepted values."""
    what = f"{field} = {json.dumps(value)[:100]} is not supported by this model"
    harmless = " or ".join(json.dumps(one) for one in neutral if one is not None) or "null"
    facts = f"it would change the answer; only {harmless} is accepted"
    return invalid_request(what, facts, hint=f"leave {field} out", param=field)


def unknown_parameter(field: str, known: Iterable[str]) -> RequestRefused:
    """Return the error of an unknown request field (HTTP 400), with OpenAI's message and code.

    `known` are the names of all accepted fields; the closest one is suggested."""
    close = nearest(field[:100], known)
    hint = close if close.startswith("did you mean") else "leave it out; the guide lists the supported ones"
    what = f"Unknown parameter: {field[:100]!r}."
    return RequestRefused(400, what, hint=hint, code="unknown_parameter", param=field[:100])


def context_exceeded(
    context_tokens: int, prompt_tokens: int, answer_tokens: int, *, facts: str = "", field: str = "messages"
) -> RequestRefused:
    """Return the error of a request that exceeds the context (HTTP 400), with OpenAI's message and code.

    `context_tokens` is the model's limit, `answer_tokens` the length of the answer that the client asked for, and
    `field` the field of the request that has the prompt. `facts` says why a text is certainly too long; `prompt_tokens`
    is then only a lower bound."""
    total = prompt_tokens + answer_tokens
    if not facts:
        facts = f"you requested {total} tokens ({prompt_tokens} in the {field}, {answer_tokens} in the completion)"
    what = f"This model's maximum context length is {context_tokens} tokens. However, {facts}."
    hint, code = f"reduce the length of the {field} or completion", "context_length_exceeded"
    return RequestRefused(400, what, hint=hint, code=code, param=field, context=(total, context_tokens))


def from_error(error: EtudeError) -> RequestRefused:
    """Convert an error that was raised while a request was served into the `RequestRefused` that the client gets.

    `ContextFull` and `MalformedRequest` (such as an invalid grammar) become HTTP 400. Any other `EngineError` means
    that no engine could answer, and becomes 503. All other errors become 400. For `MalformedRequest` the client gets
    only the facts and the hint, since `what` contains the engine's internal id of the request."""
    what, facts, hint = error.what, error.facts, error.hint
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, ContextFull):
        return RequestRefused(400, what, facts, hint=hint, code="context_length_exceeded", param="messages")
    if isinstance(error, MalformedRequest):
        return invalid_request("the engine refused the request", facts or what, hint=hint)
    if isinstance(error, EngineError):
        return RequestRefused(503, what, facts, hint=hint, code="engine_unavailable")
    return invalid_request(what, facts, hint=hint, param="messages")
