"""The tools that a request of the Responses API declares. Each becomes a function for the model; the client executes
it.

A *function* takes JSON, a *custom* tool takes one text, and a *namespace* contains tools of both kinds. The model
sees the tool ``shell`` of the namespace ``box`` as the function ``box__shell``, and a custom tool as a function of
`input`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from etude.gateway.errors import invalid_request
from etude.gateway.requests import function_tool


class _Format(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""


class DeclaredTool(msgspec.Struct):
    """A tool as a request of the Responses API declares it.

    - `type`: "function", "custom" (takes one text), "namespace" (a group of tools), or a type that is refused
    - `parameters`: JSON schema of a function's arguments
    - `format`: what text a custom tool takes: any text, or the texts of a grammar
    - `tools`: the tools in a namespace
    - `function`: the field in which the chat completions API declares a function; a tool that has it is refused"""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: _Format | None = None
    tools: list[DeclaredTool] = []
    function: Any = None


class ToolName(NamedTuple):
    """The name of a tool in a response: its namespace ("" for none), its name in the namespace, and whether it is a
    custom tool."""

    namespace: str
    name: str
    custom: bool


def function_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees a tool.

    >>> function_name("box", "shell"), function_name("", "shell")
    ('box__shell', 'shell')
    """
    return f"{namespace}__{name}" if namespace else name


def functions(tools: Sequence[DeclaredTool], *, must_call: bool) -> list[dict[str, Any]]:
    """Convert declared tools to OpenAI's list of functions. `must_call`: whether the answer must be a call.

    Raises `RequestRefused` for tools that only the vendor's server can execute, such as web search, and, with
    `must_call`, for a custom tool with a Lark grammar."""
    return [one for i, tool in enumerate(tools) for one in _functions(tool, "", f"tools[{i}]", must_call)]


def _functions(tool: DeclaredTool, namespace: str, where: str, must_call: bool) -> Iterator[dict[str, Any]]:
    if tool.type == "namespace" and not namespace:
        for i, inner in enumerate(tool.tools):
            if i == 0 and tool.description:
                inner = msgspec.structs.replace(inner, description=f"{tool.description}\n\n{inner.description or ''}")
            yield from _functions(inner, tool.name, f"{where}.tools[{i}]", must_call)
        return
    if tool.type not in ("function", "custom"):
        hint = "switch these tools off in the client; it executes those of type function, custom or namespace itself"
        what = f"{where}: tools of type {tool.type[:100]!r} are not supported by this model"
        raise invalid_request(what, "only the vendor's server can execute them", hint=hint, param=where)
    if tool.function is not None:
        what = f"{where} has the form of chat completions"
        hint = 'send {"type": "function", "name": ..., "description": ..., "parameters": {...}}'
        raise invalid_request(what, hint=hint, param=where)
    description, schema, form = tool.description, tool.parameters, tool.format
    if tool.type == "custom":
        text: dict[str, Any] = {"type": "string"}
        if form is not None and form.type == "grammar":
            if form.syntax == "regex":
                text["pattern"] = f"^(?:{form.definition})$"
            elif must_call:
                what = f"{where}.format: this model cannot be forced to call a tool with a Lark grammar"
                hint = "use tool_choice = auto, or syntax = regex"
                raise invalid_request(what, hint=hint, param="tool_choice")
            description = f"{description or ''}\n\nThe input follows this grammar ({form.syntax}):\n{form.definition}"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    yield function_tool(function_name(namespace, tool.name), description, schema)


def names_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, ToolName]:
    """Return, for each function name that the model sees, the name that a response must use for the tool.

    `tools`: the list `tools` of the request's decoded JSON body."""
    found: dict[str, ToolName] = {}
    for tool in tools:
        within = tool["type"] == "namespace"
        namespace, inner = (tool.get("name", ""), tool.get("tools", ())) if within else ("", [tool])
        for one in inner:
            name = one.get("name", "")
            found[function_name(namespace, name)] = ToolName(namespace, name, one["type"] == "custom")
    return found
