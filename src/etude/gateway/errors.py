"""The errors with which the gateway refuses requests. A dialect writes them in its own format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence

from etude.errors import ContextFull, EngineError, EtudeError, MalformedRequest, nearest

_SAME = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens"),
    ("messages", "input", "prompt"),
    ("response_format", "text", "output_config"),
    ("stop", "stop_sequences"),
    ("system", "instructions"),
)
"""Fields of the APIs that have the same meaning."""
_half = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


class RequestRefused(EtudeError):
    """Raised to refuse a request. It has the HTTP status and the error that the client gets.

    - `what`, `facts`, `hint`: the three parts of `message`, the text that the client gets.
    - `code` and `param`: fields of OpenAI's error object; `param` names the invalid request field.
    - `context`: how many tokens were requested, and how many the model takes, if the context is full; else "".
    - `retry_s`: seconds after which the client may try again, for status 429 and 503.
    - `allow`: the methods that the path supports, for status 405.
    - `request_id`: the id of the refused request, as in its log line; "" before it is known."""

    request_id = ""

    def __init__(
        self,
        status: int,
        what: str,
        facts: str = "",
        *,
        hint: str,
        code: str,
        param: str | None = None,
        context: str = "",
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


def not_json(error: Exception, data: bytes, example: str = "") -> RequestRefused:
    """Return the error of a body that cannot be parsed (HTTP 400).

    `data`: the JSON text. `example`: a body that would be taken; "": none."""
    if isinstance(error, RecursionError):
        hint = "send JSON with fewer lists and objects inside one another"
        return invalid_request("the body is nested too deeply", hint=hint)
    if "surrogate" in str(error) or ("truncated" in str(error) and _half.search(data)):
        hint = "send both halves of the pair, or the character itself in UTF-8"
        return invalid_request("the body has a text with half of a surrogate pair", "it is no character", hint=hint)
    hint = "send one JSON value in UTF-8, as a JSON library writes it" + (f", such as {example}" if example else "")
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


def unknown_parameter(field: str, known: Collection[str], of_others: Collection[str] = ()) -> RequestRefused:
    """Return the error of an unknown request field (HTTP 400), with OpenAI's message and code.

    `known` are the names of all accepted fields. The closest one is suggested, or, if `field` is among the fields
    `of_others`, the other APIs, the one with the same meaning."""
    close = nearest(field[:100], known)
    hint = close if close.startswith("did you mean") else "leave it out; the guide lists the supported ones"
    if field in of_others:
        same = next((one for names in _SAME if field in names for one in names if one in known), "")
        hint = f"this API has no {field}; " + (f"send {same}" if same else "leave it out")
    what = f"Unknown parameter: {field[:100]!r}."
    return RequestRefused(400, what, hint=hint, code="unknown_parameter", param=field[:100])


def context_exceeded(
    context_tokens: int,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    facts: str = "",
    field: str = "messages",
    counted: bool = True,
) -> RequestRefused:
    """Return the error of a request that exceeds the context (HTTP 400), with OpenAI's message and code.

    `context_tokens` is the model's limit, `answer_tokens` the length of the answer that the client asked for (0: none),
    and `field` the field of the request that has the prompt. `facts` says more about the request, which OpenAI's
    message has in place of the numbers. `counted`: whether `prompt_tokens` is exact, and no lower bound."""
    total, parts = prompt_tokens + answer_tokens, f"{prompt_tokens} in the {field}"
    if answer_tokens:
        parts += f", {answer_tokens} in the completion"
    elif total == context_tokens:
        total, parts = total + 1, f"{parts}, and an answer has at least 1"
    what = f"This model's maximum context length is {context_tokens} tokens. However, "
    what += f"{facts or f'you requested {total} tokens ({parts})'}."
    context = f"{'' if counted else 'at least '}{total} tokens > {context_tokens} maximum ({facts or parts})"
    hint, code = (
        f"reduce the length of the {field}{' or completion' if answer_tokens else ''}",
        "context_length_exceeded",
    )
    return RequestRefused(400, what, hint=hint, code=code, param=field, context=context)


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
