"""Renders a checkpoint's chat template as transformers does, with limits on time and memory.

A template is untrusted code. It runs in Jinja's immutable sandbox, with the names that transformers provides: loop
controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, `{% generation %}`, and the special
tokens by name. Loop iterations, calls and sizes of texts are counted, so a hostile template ends with `ChatError` and
cannot fill the memory. The work of a single interpreter operation is bounded by the sizes of its inputs."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import EtudeError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_CHARS = 1 << 24
"""The maximum length of a rendering, and of a text in any intermediate value, in characters."""
MAX_ELEMENTS = 200_000
"""The maximum number of elements of a nested value. An element that is contained twice counts twice."""
MAX_STEPS = 300_000
"""The maximum number of loop iterations and calls in one rendering."""
DEADLINE_S = 5.0
MAX_WIDTH = 10_000
"""The maximum number that a filter or a method accepts, since it may be a width."""

_MAX_SAFE = 4096  # attributes of types whose safety is known
_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset({"index", "index0", "first", "last"})

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message may have its reasoning."""
_HINT = "compare it with the chat_template.jinja that etude packages, or with the one its makers publish"
_BUDGET = "a budget"  # no template can write a name with a blank in it


class ChatError(EtudeError):
    """Raised for messages that the chat template cannot render, and for a checkpoint without a usable chat format."""


class ChatTemplate:
    """A compiled chat template.

    - `source`: Jinja source.
    - `special`: the special tokens that the template may write, by name, such as ``bos_token``.
    - `deadline_s`: the maximum CPU time of one rendering, in seconds.
    - `limited`: False turns all limits off, for a trusted template. Rendering is then several times faster.

    Raises `ChatError` when the template does not compile.

    >>> greet = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    ...                      special={"bos_token": "<s>"})
    >>> greet.render([{"role": "user", "content": "hi"}])
    '<s>user: hi'
    """

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        limited: bool = True,
    ) -> None:
        self.source, self.special, self._deadline_s, self._instrument = source, dict(special or {}), deadline_s, limited
        if len(source) > MAX_TEMPLATE_CHARS:
            facts = f"{len(source)} characters, at most {MAX_TEMPLATE_CHARS} are read"
            raise ChatError("the chat template is too long", facts, hint=_HINT)
        try:
            parsed = _environment().parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
            self._template = (_environment() if limited else _trusted_environment()).from_string(
                _instrument(parsed) if limited else source
            )
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ChatError("the chat template does not compile", str(error), hint=_HINT) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation as text. Raises `ChatError` when the template refuses the messages or exceeds a limit.

        `tools` is OpenAI's list of tools. With `add_generation_prompt`, the text ends with the beginning of the next
        reply."""
        variables = {
            **self.special,
            "messages": [_message(m) for m in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if not self._instrument:
                return self._template.render(variables)
            return self._render_within(variables, _Budget(self._deadline_s))
        except _LimitExceeded as error:
            raise ChatError("the chat template exceeds a limit", str(error), hint=_HINT) from None
        except Exception as error:  # noqa: BLE001  untrusted code can raise anything
            hint = f"send messages in the order that it allows; if it refuses all, {_HINT}"
            raise ChatError("the chat template refused the messages", str(error) or repr(error), hint=hint) from None

    def _render_within(self, variables: dict[str, Any], budget: _Budget) -> str:
        rendering, length = [], 0
        for piece in self._template.generate({**variables, _BUDGET: budget}):
            budget.step()
            length += len(piece)
            if length > MAX_CHARS:
                raise _LimitExceeded(f"more than {MAX_CHARS} characters")
            rendering.append(piece)
        return "".join(rendering)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a message as transformers does: without None values, and with the reasoning under each of its names."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def read_template(folder: Path) -> tuple[str, str | None]:
    """Read a checkpoint's chat template. Returns its Jinja source, and the source of the one for conversations with
    tools.

    The second is None if there is only one template. Raises `ChatError` if there is none."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8"), None
    except OSError:
        pass
    except UnicodeDecodeError as error:
        raise ChatError(f"the chat template in {folder} is not UTF-8 text", str(error), hint=_HINT) from None
    found = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(found, str):
            return found, with_tools if isinstance(with_tools, str) else None
    if not isinstance(found, str):
        hint = "a tokeniser directory has tokenizer.json and chat_template.jinja"
        raise ChatError(f"no chat template in {folder}", hint=hint)
    return found, None


def read_special(folder: Path) -> dict[str, str]:
    """Read the named special tokens of a checkpoint, such as ``{"eos_token": "</s>"}``.

    Files that cannot be read are skipped."""
    known = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    contents = {name: known.get(name) for name in NAMED_TOKENS}
    plain = {name: c.get("content") if isinstance(c, dict) else c for name, c in contents.items()}
    return {name: content for name, content in plain.items() if isinstance(content, str)}


def stop_ids(folder: Path) -> list[int]:
    """Return the stop token ids in a checkpoint's generation_config.json and config.json.

    Files that cannot be read are skipped."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found += [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0]
    return list(dict.fromkeys(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# limits


class _LimitExceeded(jinja2.TemplateError):
    """Raised when a template has exceeded a limit."""


class _Budget:
    """The remaining budget of one rendering: of `MAX_STEPS` steps, and of `deadline_s` seconds of CPU time."""

    def __init__(self, deadline_s: float) -> None:
        self.steps = MAX_STEPS
        self._half_s = deadline_s / 2
        self._half_time, self._deadline = time.perf_counter() + self._half_s, 0.0

    def step(self) -> None:
        """Count one loop iteration or call. Raises `_LimitExceeded`."""
        self.steps -= 1
        if self.steps < 0:
            raise _LimitExceeded(f"more than {MAX_STEPS} loop iterations and calls")
        if not self.steps % 8 and time.perf_counter() > self._half_time:
            now = time.thread_time()  # a slow system call, so it counts the second half of the time only
            self._deadline = self._deadline or now + self._half_s
            if now > self._deadline:
                raise _LimitExceeded("it took too much CPU time")


def _size(*values: Any) -> int:
    """Return the number of characters and elements in nested plain data. Raises `_LimitExceeded` above the limits."""
    total, elements, waiting = 0, 0, list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)  # `isinstance` reads the class of an object of the template, which is slow
        elements += 1
        if issubclass(kind, str):
            total += len(value)
        elif issubclass(kind, dict):
            waiting += value
            waiting += value.values()
        elif issubclass(kind, list | tuple):
            waiting += value
        elif issubclass(kind, Mapping):
            waiting += [*value.keys(), *value.values()]
        if total > MAX_CHARS or elements + len(waiting) > MAX_ELEMENTS:
            raise _LimitExceeded(f"a value of more than {MAX_CHARS} characters or {MAX_ELEMENTS} elements")
    return total + elements


def _check_call(name: str, values: Sequence[Any]) -> None:
    """Raise `_LimitExceeded` when the result of a filter or a method could be much larger than its arguments."""
    _size(*values)
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH and name != "range":
            raise _LimitExceeded(f"{name} with {value}")
    if name in ("replace", "join", "indent", "wordwrap", "translate"):
        texts = [_size(value) for value in values]
        if texts and max(texts[1:], default=1) * texts[0] > MAX_CHARS:
            raise _LimitExceeded(f"{name} of {texts[0]} characters with {max(texts[1:])}")
    if name in ("format", "format_map") and any(_has_width(v) for v in values if isinstance(v, str)):
        raise _LimitExceeded(f"{name} with a wide field")


def _has_width(text: str) -> bool:
    """Return whether a format string has a number of five digits or more, or a width from an argument."""
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    return "*" in text or any(len(number) > 4 for number in digits)


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    if name in ("count", "length"):  # they return a number, and templates ask for it in each iteration
        return filter_

    @functools.wraps(filter_)  # keeps the attributes by which Jinja passes the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        plain = [a for a in args if not isinstance(a, jinja2.Environment | jinja2.runtime.Context | nodes.EvalContext)]
        _check_call(name, [*plain, *kwargs.values()])
        return filter_(*args, **kwargs)

    return checked


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on steps and sizes."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    _safe: ClassVar[dict[tuple[type, str], bool]] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return what Jinja's sandbox says of an attribute, which depends on the object's type only."""
        key = type(obj), attr
        if (safe := self._safe.get(key)) is None:
            if len(self._safe) >= _MAX_SAFE:
                self._safe.clear()
            safe = self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what Jinja's sandbox returns, faster for the keys of a dict that has no such attribute, and for the
        numbers of a loop."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICT:
                return obj[attribute]
        elif kind is jinja2.runtime.LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str and len(left) + len(right) < MAX_CHARS:
            return left + right
        size = _size(left, right)
        if operator == "*" and (not isinstance(left, int | float) or not isinstance(right, int | float)):
            times = next((v for v in (left, right) if isinstance(v, int)), 1)
            if size * max(times, 1) > MAX_CHARS:
                raise _LimitExceeded(f"a text repeated {times} times")
        if operator == "**" and (abs(left) > MAX_WIDTH or abs(right) > 64):
            raise _LimitExceeded(f"{left} ** {right}")
        if operator == "*" and isinstance(left, int) and isinstance(right, int) and max(left, right) > 1 << 63:
            raise _LimitExceeded("a number of more than 63 bits")
        if operator == "%" and isinstance(left, str) and _has_width(left):
            raise _LimitExceeded("a format with a wide field")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[_BUDGET].step()
        if __obj is _Sandbox.turn:
            return ""
        receiver = getattr(__obj, "__self__", None)
        plain = [a for a in args if not isinstance(a, jinja2.runtime.Context)]
        if isinstance(receiver, str):
            _check_call(__obj.__name__, [receiver, *plain, *kwargs.values()])
        else:
            _size(*plain, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the field widths of `str.format`, beside Jinja's own checks."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_call("format", [value.__self__, *args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    @staticmethod
    def turn() -> str:
        """Called once per loop iteration, so that `call` counts it."""
        return ""

    @staticmethod
    def joined(*parts: Any) -> str:
        """Return the result of `~`. `call` has checked the sizes of its parts."""
        return "".join(map(str, parts))


def _instrument(parsed: nodes.Template) -> nodes.Template:
    """Instrument a template: count each loop iteration and check each `~`."""
    for loop in parsed.find_all((nodes.For, nodes.Macro)):
        turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(turn))  # type: ignore[attr-defined]
    for parent in [parsed, *parsed.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, list):
                setattr(parent, field, [_checked_join(v) for v in value])
            else:
                setattr(parent, field, _checked_join(value))
    return parsed.set_environment(_environment())  # type: ignore[return-value]


def _checked_join(node: Any) -> Any:
    if not isinstance(node, nodes.Concat):
        return node
    return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)


# what transformers provides to templates


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on. Here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012  as in Jinja

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_output(value: Any) -> Any:
    """Check the size of a value that `{{ }}` writes: a nested value may be longer as text than in memory."""
    if not isinstance(value, str):
        _size(value)
    return value


def _add_globals(environment: jinja2.Environment) -> None:
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


@functools.lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_check_output
    )
    _add_globals(environment)
    environment.filters = {name: _bounded_filter(name, one) for name, one in environment.filters.items()}
    del environment.globals["lipsum"]  # pages of text
    return environment


@functools.lru_cache(maxsize=1)
def _trusted_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    _add_globals(environment)
    return environment
