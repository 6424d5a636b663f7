"""Checks of the JSON schemas in a request, before anything is sampled. Raises only `RequestRefused`.

A schema that the answer must follow is compiled, so everything that `etude.grammars` does not support is refused. The
schema of a tool that the model may call, but need not, only has to be a valid JSON schema."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from etude import grammars
from etude.gateway.errors import RequestRefused, invalid_request
from etude.gateway.requests import ChatRequest

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NUMBERS = ("minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems")
_OF_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_schemas(parsed: ChatRequest) -> None:
    """Check the JSON schemas of a request: of its tools, and of the answer.

    Raises `RequestRefused` (HTTP status 400), which names the invalid one."""
    must_follow = parsed.must_call or parsed.schema is not None
    for tool in parsed.tools:
        function = tool.get("function")
        schema = function.get("parameters") if isinstance(function, dict) else None
        if schema:
            what = f"the parameters of the tool {str(function.get('name'))[:100]!r}"  # type: ignore[union-attr]
            _check(schema, what, "tools", compiled=must_follow)
    if parsed.schema is not None:
        _check(parsed.schema, parsed.schema_field, parsed.schema_field, compiled=True)


def _check(schema: Any, what: str, param: str, *, compiled: bool) -> None:
    try:
        fault = fault_of(schema)
        if fault:
            raise _refused(what, fault, param)
        if compiled:
            fault = _fault_of_grammar(
                grammars.from_json_schema(
                    {"type": "object", **schema} if param == "tools" and isinstance(schema, dict) else schema
                )
            )
            if fault:
                raise _refused(what, fault, param)
    except RecursionError:
        raise _refused(what, "it is nested too deeply", param) from None


@lru_cache(maxsize=64)
def _fault_of_grammar(grammar: str) -> str:
    """Return why a grammar cannot be used; "" if it can. Without llguidance only the engine checks it."""
    if importlib.util.find_spec("llguidance") is None:
        return ""
    try:
        grammars.check(grammar)
    except grammars.GrammarError as error:
        return error.facts or error.what
    return ""


def _refused(what: str, facts: str, param: str) -> RequestRefused:
    hint = "correct the JSON schema; docs/guides/sampling.md says which keywords are supported"
    return invalid_request(f"{what}: the schema is invalid or not supported", facts, hint=hint, param=param)


def fault_of(schema: Any, where: str = "schema") -> str:
    """Return why, and at which place, a value is not a valid JSON schema; "" for a valid one.

    Keywords that are not known here may have any value.

    >>> fault_of({"properties": {"a": {"type": "objekt"}}})
    "schema.properties.a.type is 'objekt', not one of array, boolean, integer, null, number, object, string"
    """
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{where} is {str(schema)[:40]!r}, not an object"
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if kind not in _TYPES:
            return f"{where}.type is {str(kind)[:40]!r}, not one of {', '.join(_TYPES)}"
    for name in _NUMBERS:
        if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
            return f"{where}.{name} is {str(schema[name])[:40]!r}, not a number"
    inner = [(f"{where}.{n}", schema[n]) for n in _OF_SCHEMA if n in schema and not isinstance(schema[n], list)]
    for name in _OF_SCHEMAS:
        if name in schema:
            if not isinstance(schema[name], list):
                return f"{where}.{name} is not a list of schemas"
            inner += [(f"{where}.{name}[{i}]", one) for i, one in enumerate(schema[name])]
    for name in _OF_NAMED:
        if name in schema:
            if not isinstance(schema[name], Mapping):
                return f"{where}.{name} is not an object of schemas"
            inner += [(f"{where}.{name}.{key[:40]}", one) for key, one in schema[name].items()]
    return next(filter(None, (fault_of(one, place) for place, one in inner)), "")
