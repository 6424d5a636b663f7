"""Parse Dockerfiles into stages and instructions.

Unsupported syntax raises an error with its line and a hint. Reference: Docker's "Dockerfile reference", and BuildKit's
parser for line continuation: a backslash at the end of a line joins it to the next, without comments and empty lines in
between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from etude.environments.images.limits import BadSource, ImageLimits
from etude.errors import nearest

INSTRUCTIONS = ("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "SHELL", "LABEL", "EXPOSE", "CMD",
                "ENTRYPOINT", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER")  # fmt: skip
NO_EFFECT = ("VOLUME", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER")
"""Instructions without an effect on machines. They are parsed and recorded in the image's metadata."""

_FLAGS = {
    "FROM": ("platform",),
    "COPY": ("from", "chown", "chmod", "link"),
    "ADD": ("chown", "chmod", "link"),
    "RUN": ("mount", "network"),
}
_TAKES_DOCUMENTS = ("RUN", "COPY", "ADD")
_TAKES_JSON = ("RUN", "CMD", "ENTRYPOINT", "COPY", "ADD", "SHELL", "VOLUME")
_CONTINUED = re.compile(r"(.*?)(?<!\\)\\[ \t]*")
_DOCUMENT = re.compile(r"\d*<<(-?)((['\"]?)([^<'\"]+)\3)")

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)(?:(:?[-+])([^{}]*))?\}|([A-Za-z_]\w*))")
_PART = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?:\\.|[^'\"\\\s])+"
_WORD = rf"(?:{_PART})+"


class Document(NamedTuple):
    """A here-document of an instruction (``<<EOF``): its name and text.

    `expands` says whether variables in the text are replaced, which is so if the name has no quotes."""

    name: str
    text: str
    expands: bool


class Instruction(NamedTuple):
    """One instruction of a Dockerfile.

    `line` is its first line, counted from 1. `flags` are options such as ``--from=build``, and `documents` its
    here-documents. In exec form (`is_exec`, a JSON list) `args` are the arguments; in shell form it is one item with
    the whole text."""

    line: int
    name: str
    flags: dict[str, str]
    args: tuple[str, ...]
    is_exec: bool  # written as a JSON list
    documents: tuple[Document, ...] = ()

    def error(self, what: str, hint: str) -> BadSource:
        """Build the error for this instruction: its line, what is wrong, and a hint."""
        return BadSource(f"Dockerfile line {self.line}: {what}", hint=hint)


class Stage(NamedTuple):
    """One build stage: the FROM instruction `begin`, and the instructions up to the next FROM.

    `base` is the image or stage that it starts from. `name` is "" for a stage without a name."""

    name: str  # "" for a stage without a name
    begin: Instruction
    base: str
    instructions: tuple[Instruction, ...]


class Dockerfile(NamedTuple):
    """A parsed Dockerfile: the ARG instructions before the first FROM, and the stages."""

    arguments: tuple[Instruction, ...]
    stages: tuple[Stage, ...]


def parse(text: str, limits: ImageLimits) -> Dockerfile:
    """Parse the text of a Dockerfile. Raises `BadSource` with the line of the first error.

    >>> parse("FROM scratch AS a\\nENV X=1 \\\\\\n  Y=2", ImageLimits()).stages[0].instructions[0].args
    ('X=1   Y=2',)
    """
    found = list(_instructions(text))
    if len(found) > limits.num_layers:
        raise BadSource(
            f"the Dockerfile has {len(found)} instructions",
            f"at most {limits.num_layers} are allowed",
            hint="join some RUN lines",
        )
    starts = [i for i, instruction in enumerate(found) if instruction.name == "FROM"]
    before = found[: starts[0]] if starts else found
    for instruction in before:
        if instruction.name != "ARG":
            raise instruction.error(
                f"{instruction.name} before FROM", "start with FROM and an image of the store, or scratch"
            )
    if not starts:
        raise BadSource("the Dockerfile has no FROM", hint="start with FROM and an image of the store, or scratch")
    stages: list[Stage] = []
    for start, end in zip(starts, [*starts[1:], len(found)], strict=True):
        base, name = _from(found[start])
        if name and name in {stage.name for stage in stages}:
            raise found[start].error(f"a second stage {name!r}", "give each stage a different name")
        stages.append(Stage(name, found[start], base, tuple(found[start + 1 : end])))
    return Dockerfile(tuple(before), tuple(stages))


def _instructions(text: str) -> Iterator[Instruction]:
    lines = iter(enumerate(text.replace("\r\n", "\n").split("\n"), start=1))
    begun = False
    for number, line in lines:
        if not begun and re.match(r"#\s*escape\s*=", line.strip(), re.I):
            raise BadSource(
                f"Dockerfile line {number} sets another escape character", hint="only the backslash can continue a line"
            )
        if _is_ignored(line):
            continue
        begun = True
        yield _with_documents(_instruction(number, _joined(line.lstrip(), lines)), lines)


def _is_ignored(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _joined(line: str, lines: Iterator[tuple[int, str]]) -> str:
    parts = []
    while found := _CONTINUED.fullmatch(line):
        parts.append(found[1])
        line = next((following for _, following in lines if not _is_ignored(following)), "")
    return "".join([*parts, line]).strip()


def _instruction(line: int, text: str) -> Instruction:
    name, rest = (*re.split(r"\s+", text, maxsplit=1), "")[:2]
    bare = Instruction(line, name.upper(), {}, (), False)
    if bare.name == "ONBUILD":
        raise bare.error("ONBUILD is not supported", "write the instruction into the Dockerfile that uses this image")
    if bare.name not in INSTRUCTIONS:
        raise bare.error(f"unknown instruction {name[:40]!r}", nearest(bare.name, INSTRUCTIONS))
    flags, rest = _flags(bare, rest)
    if not rest:
        raise bare.error(f"{bare.name} without arguments", "add its arguments")
    args = _json_list(rest) if bare.name in _TAKES_JSON else None
    if bare.name == "SHELL" and args is None:
        raise bare.error("SHELL without a JSON list", 'write SHELL ["/bin/bash", "-c"]')
    if bare.name not in ("RUN", "CMD", "ENTRYPOINT", "SHELL", *NO_EFFECT) and (odd := unsupported(rest)):
        raise bare.error(f"{odd[:60]!r} is not supported", "write ${NAME}, ${NAME:-default} or ${NAME:+other}")
    return Instruction(line, bare.name, flags, (rest,) if args is None else args, args is not None)


def _flags(bare: Instruction, rest: str) -> tuple[dict[str, str], str]:
    """Parse the flags of an instruction. Returns them, and the text after them."""
    flags: dict[str, str] = {}
    while bare.name in _FLAGS and (found := re.match(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)", rest)):
        name, value = found[1], found[2]
        if name not in _FLAGS[bare.name] or (value is None and name != "link"):
            known = ", ".join(f"--{flag}=..." for flag in _FLAGS[bare.name])
            raise bare.error(f"{bare.name} has no flag --{name[:40]}", f"it has {known}: leave others out")
        if name == "mount" and not re.search(r"(^|,)type=(cache|tmpfs)(,|$)", value):
            hint = "COPY what it needs; only type=cache and type=tmpfs work, as folders of the image"
            raise bare.error(f"RUN --mount={value[:60]} is not supported", hint)
        if name == "network" and value not in ("none", "default"):
            raise bare.error(f"RUN --network={value[:20]}", "it never has the network of the host: leave it out")
        flags[name] = value or ""
        rest = rest[found.end() :]
    return flags, rest.strip()


def _with_documents(at: Instruction, lines: Iterator[tuple[int, str]]) -> Instruction:
    """Read the here-documents of an instruction from the following lines."""
    if at.name not in _TAKES_DOCUMENTS or at.is_exec:
        return at
    documents = []
    for word in split_words(at.args[0]):
        if found := _DOCUMENT.fullmatch(word):
            strip = "\t" if found[1] else ""
            body: list[str] = []
            for _, line in lines:
                line = line.lstrip(strip) if strip else line
                if line == found[4]:
                    break
                body.append(f"{line}\n")
            else:
                raise at.error(f"the here-document {found[4][:40]} does not end", "add a line with only its name")
            documents.append(Document(found[4], "".join(body), expands=not found[3]))
    return at._replace(documents=tuple(documents))


def _json_list(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        args = json.loads(text)
    except (ValueError, RecursionError):
        return None  # shell form, as in Docker
    if isinstance(args, list) and args and all(isinstance(word, str) and "\0" not in word for word in args):
        return tuple(args)
    return None


def _from(instruction: Instruction) -> tuple[str, str]:
    args = instruction.args[0].split()
    if len(args) == 3 and args[1].upper() == "AS" and re.fullmatch("[a-z][a-z0-9-_.]*", args[2].lower()):
        return args[0], args[2].lower()
    if len(args) != 1:
        raise instruction.error("FROM takes an image and an optional AS name", "write FROM image AS name")
    return args[0], ""


def split_words(text: str) -> list[str]:
    """Split a text at spaces outside of quotes; the words keep their quotes."""
    return re.findall(_WORD, text)


def unsupported(text: str) -> str:
    """Return the first variable reference that `expand` does not support; "" if there is none.

    Text in single quotes is not searched.

    >>> unsupported("${A:-b} '${C%d}' ${E##*/}")
    '${E##*/}'
    """
    left = _VARIABLE.sub("", re.sub("'[^']*'", "", text))
    found = re.search(r"\$\{[^}]*\}?", left)
    return found[0] if found else ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace the variables in a text: $NAME, ${NAME}, ${NAME:-default} and ${NAME:+other}.

    A backslash protects a dollar sign. Without the colon (${NAME-default}) an empty value counts as set.

    >>> expand(r"${A}/$B/${C:-c}/\\$A", {"A": "1"})
    '1//c/$A'
    """

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[1] if found[1] == "$" else found[0]
        name, how = found[2] or found[5], found[3]
        known = variables.get(name, "")
        if not how:
            return known
        there = bool(known) if how[0] == ":" else name in variables
        return (known if there else found[4]) if how[-1] == "-" else (found[4] if there else "")

    return _VARIABLE.sub(value, text)


def pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values that an ENV or LABEL instruction sets, with variables expanded.

    Both forms are read: ``ENV NAME=value ...`` and ``ENV NAME value``. Raises `BadSource` for other text."""
    text = instruction.args[0]
    name, rest = (*re.split(r"\s+", text, maxsplit=1), "")[:2]
    if "=" not in name:
        if not rest or not _NAME.fullmatch(name):
            raise instruction.error(f"{instruction.name} without a value", "write NAME=value")
        return {name: expand(rest.strip(), variables)}
    found = {}
    for word in args_of(instruction, variables):
        name, equals, value = word.partition("=")
        if not equals or not name or (instruction.name == "ENV" and not _NAME.fullmatch(name)):
            raise instruction.error(f"{word[:60]!r} is not NAME=value", "write NAME=value")
        found[name] = value
    return found


def args_of(instruction: Instruction, variables: Mapping[str, str]) -> list[str]:
    """Return the arguments of an instruction, with variables expanded (not in single quotes) and quotes removed.

    Raises `BadSource` if a quote is not closed."""
    if instruction.is_exec:
        return [expand(word, variables) for word in instruction.args]
    text = instruction.args[0]
    if re.search(r"\S", re.sub(_WORD, "", text)):
        raise instruction.error("a quote is not closed", "close it")
    return [_unquoted(word, variables) for word in split_words(text)]


def _unquoted(word: str, variables: Mapping[str, str]) -> str:
    out = []
    for part in re.findall(_PART, word):
        if part[0] == "'":
            out.append(part[1:-1])
        elif part[0] == '"':
            out.append(re.sub(r'\\(["\\$])', r"\1", expand(part[1:-1], variables)))
        else:
            out.append(re.sub(r"\\(.)", r"\1", expand(part, variables)))
    return "".join(out)


def arguments_of(
    instruction: Instruction, given: Mapping[str, str], variables: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Return the names that an ARG instruction declares, with their values.

    A value comes from `given`, or else from the default in the instruction, or else it is None. `variables` are
    expanded in defaults. Raises `BadSource` for an invalid name."""
    found: list[tuple[str, str | None]] = []
    for word in args_of(instruction, variables):
        name, equals, default = word.partition("=")
        if not _NAME.fullmatch(name):
            raise instruction.error(f"{name[:40]!r} is not a valid name of an argument", "write ARG NAME=default")
        found.append((name, given.get(name, default if equals else None)))
    return found
