"""The OpenAPI document of a gateway, generated from the structs that decode the bodies of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import etude
from etude.gateway.dialects import DIALECTS, Dialect
from etude.gateway.dialects.messages import error as anthropic_error
from etude.gateway.requests import MAX_TOP_LOGPROBS, RANGES, BodyDecoder

_RANGES: dict[str, tuple[float, float | None]] = {
    **RANGES,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (1, None)),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "min_tokens": (0, None),
    "top_k": (-1, None),
}
_REQUIRED = {  # fields of responses that are not streams
    "chat": ("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    "text": ("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    "responses": ("id", "object", "created_at", "model", "status", "error", "output", "usage"),
    "messages": ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
}
_STATUSES = {
    400: "The body is not JSON or is refused: a parameter that is unknown, not supported or out of range, a"
    " conversation that cannot be answered or does not fit the context",
    401: "No API key of the gateway",
    403: "The gateway has no API keys, and the host name is not this machine's",
    404: "There is no such model",
    413: "The body is too large",
    415: "The content type is not application/json",
    429: "Too many requests wait, or a limit of the key is reached; `retry-after` has the seconds",
    503: "No engine answers, or the gateway stops; `retry-after` has the seconds",
    504: "The answer was not complete in time",
}
_OF_SIGNALS = {404: "An answer is unknown", 409: "A signal with this id and other content is known", 410: "Too late"}
_STRING = {"type": "string"}
_LIST = {"type": "object", "required": ["object", "data"], "properties": {"data": {"type": "array"}}}
_MODEL = {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"]}


def document(
    models: Sequence[str], *, has_keys: bool, feedback: Sequence[type[msgspec.Struct]] | None = None
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a gateway.

    - `models`: the names of the served models.
    - `has_keys`: whether a request needs an API key.
    - `feedback`: the structs that a body with signals may have; None: the gateway takes no signals.

    A body that fits its schema may be refused with status 400: a schema says nothing about the order of messages or
    the length of the context, for example. One that does not fit is always refused."""
    denied = (401,) if has_keys else (403,)
    schemas: dict[str, Any] = {
        "OpenAIError": _error_schema({"message": _STRING, "type": _STRING, "param": _or_null, "code": _STRING}),
        "AnthropicError": _error_schema({"type": _STRING, "message": _STRING}, {"type": {"const": "error"}}),
    }
    paths: dict[str, Any] = {
        "/health": {
            "get": {**_operation("Whether requests are taken", _whole({"type": "object"}), ()), "security": []}
        },
        "/openapi.json": {"get": {**_operation("This document", _whole({"type": "object"}), ()), "security": []}},
        "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": {"schema": _STRING}}, (*denied, 404))},
        "/v1/models": {"get": _operation("The served models", _whole(_LIST), (*denied, 503))},
        "/v1/models/{name}": {
            "get": _operation("One served model", _whole(_MODEL), (*denied, 404, 503)),
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
        },
    }
    paths["/health"]["get"]["responses"]["503"] = {"description": "The gateway stops", "content": _whole({})}
    refusals = (400, *denied, 404, 413, 415, 429, 503, 504)
    for name, dialect in DIALECTS.items():
        schema, parts = _body_schema(dialect.decoder, name, models)
        schemas |= parts
        of_anthropic = dialect.error is anthropic_error
        schemas[name] = {**schema, "required": [*schema["required"], *(("max_tokens",) if of_anthropic else ())]}
        answer = {"type": "object", "required": list(_REQUIRED[name])}
        answers = {**_whole(answer), "text/event-stream": {}}
        paths[dialect.path] = {"post": _operation(f"An answer ({name})", answers, refusals, dialect, body=name)}
        if of_anthropic:
            schemas["count"] = schema
            counted = _whole({"type": "object", "required": ["input_tokens"]})
            paths[f"{dialect.path}/count_tokens"] = {
                "post": _operation("The tokens of a prompt", counted, refusals, dialect, body="count")
            }
    if feedback is not None:
        kinds, parts = msgspec.json.schema_components(feedback, ref_template="#/components/schemas/feedback{name}")
        schemas |= {f"feedback{name}": schema for name, schema in parts.items()} | {"feedback": {"anyOf": list(kinds)}}
        taken = (400, *denied, *_OF_SIGNALS, 413, 415, 503)
        signals = _operation("Signals about answers", _whole(_LIST), taken, body="feedback")
        for status, about in _OF_SIGNALS.items():
            signals["responses"][str(status)]["description"] = about
        paths["/v1/feedback"] = {"post": signals}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "etude", "version": etude.__version__},
        "paths": paths,
        "components": {"schemas": schemas} | ({"securitySchemes": schemes} if has_keys else {}),
        **({"security": [{name: []} for name in schemes]} if has_keys else {}),
    }


_or_null = {"type": ["string", "null"]}


def _error_schema(fields: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    error = {"type": "object", "required": list(fields), "properties": dict(fields)}
    properties = {**(others or {}), "error": error}
    return {"type": "object", "required": list(properties), "properties": properties}


def _whole(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(
    summary: str,
    answer: Mapping[str, Any],
    refusals: Sequence[int],
    dialect: Dialect | None = None,
    *,
    body: str = "",
) -> dict[str, Any]:
    """Return one operation. `answer`: the content of status 200; `body`: the name of the body's schema, "" for none."""
    is_anthropic = dialect is not None and dialect.error is anthropic_error
    error = _whole(_reference("AnthropicError" if is_anthropic else "OpenAIError"))
    responses = {str(status): {"description": _STATUSES.get(status, ""), "content": error} for status in refusals}
    request = {"requestBody": {"required": True, "content": _whole(_reference(body))}} if body else {}
    return {
        "summary": summary,
        **request,
        "responses": {"200": {"description": "OK", "content": answer}, **responses},
    }


def _body_schema(
    decoder: BodyDecoder[Any], prefix: str, models: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the JSON schema of a dialect's body, and those to which it refers, by name. `prefix` begins the names."""
    fields = [
        (one.name, kind, msgspec.field(default=None if isinstance(one.default, msgspec.Raw) else one.default))
        if not one.required
        else (one.name, kind)
        for one in msgspec.structs.fields(decoder.kind)
        for kind in [decoder.parts.get(one.name, one.type)]
    ]
    whole = msgspec.defstruct("Body", fields, kw_only=True, forbid_unknown_fields=True)
    _, found = msgspec.json.schema_components([whole], ref_template=f"#/components/schemas/{prefix}{{name}}")
    schema = found.pop("Body")
    properties = schema["properties"]
    for name, one in properties.items():
        low, high = _RANGES.get(name, (None, None))
        for kind in one.get("anyOf", [one]):
            if kind.get("type") in ("integer", "number"):
                kind |= {key: bound for key, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    properties |= {name: {"enum": list(accepted)} for name, accepted in sorted(decoder.neutral.items())}
    properties |= {name: {} for name in sorted(set(decoder.harmless) - properties.keys())}
    properties["model"] = {"enum": list(models)}
    return schema, {f"{prefix}{name}": one for name, one in found.items()}
