"""Dockerfiles as data: instructions with their line, flags, words and here-documents. What is not followed is an error
with its line and what to do.

Knows nothing of images and machines. Reference: Docker's "Dockerfile reference" and BuildKit's parser for what the
words mean: a backslash at a line's end joins it to the next with nothing between, comments and empty lines in between
are gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from etude.environments.images.dockerfile_words import raw_words, unsupported
from etude.environments.images.limits import BadSource, ImageLimits
from etude.errors import nearest

INSTRUCTIONS = ("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "SHELL", "LABEL", "EXPOSE", "CMD",
                "ENTRYPOINT", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER")  # fmt: skip
MEANINGLESS = ("VOLUME", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER")
"""What a machine has no use for: read, kept in the record of how the image was made, and nothing else."""

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


class Document(NamedTuple):
    """A here-document. `expands`: variables in it are replaced, as its name was written without quotes."""

    name: str
    text: str
    expands: bool


class Instruction(NamedTuple):
    """One instruction. `words` is what follows: exec form's words, or shell form's text as the only one."""

    line: int
    name: str
    flags: dict[str, str]
    words: tuple[str, ...]
    is_exec: bool  # written as a JSON list
    documents: tuple[Document, ...] = ()

    def error(self, what: str, hint: str) -> BadSource:
        """An error that names this instruction's line."""
        return BadSource(f"Dockerfile line {self.line}: {what}", hint=hint)


class Stage(NamedTuple):
    """From one FROM to the next."""

    name: str  # "" where none is given
    begin: Instruction
    base: str
    instructions: tuple[Instruction, ...]


class Dockerfile(NamedTuple):
    """`arguments` are the ARGs before the first FROM."""

    arguments: tuple[Instruction, ...]
    stages: tuple[Stage, ...]


def parse(text: str, limits: ImageLimits) -> Dockerfile:
    """The stages of a Dockerfile. Raises `BadSource`.

    >>> parse("FROM scratch AS a\\nENV X=1 \\\\\\n  Y=2", ImageLimits()).stages[0].instructions[0].words
    ('X=1   Y=2',)
    """
    found = list(_instructions(text))
    if len(found) > limits.num_layers:
        raise BadSource(f"a Dockerfile of {len(found)} instructions", f"at most {limits.num_layers}", hint="split it")
    starts = [i for i, instruction in enumerate(found) if instruction.name == "FROM"]
    before = found[: starts[0]] if starts else found
    for instruction in before:
        if instruction.name != "ARG":
            raise instruction.error(
                f"{instruction.name} before FROM", "begin with FROM an image of the store, or scratch"
            )
    if not starts:
        raise BadSource("a Dockerfile without FROM", hint="begin with FROM an image of the store, or scratch")
    stages: list[Stage] = []
    for start, end in zip(starts, [*starts[1:], len(found)], strict=True):
        base, name = _from(found[start])
        if name and name in {stage.name for stage in stages}:
            raise found[start].error(f"a second stage {name!r}", "give each stage a name of its own")
        stages.append(Stage(name, found[start], base, tuple(found[start + 1 : end])))
    return Dockerfile(tuple(before), tuple(stages))


def _instructions(text: str) -> Iterator[Instruction]:
    lines = iter(enumerate(text.replace("\r\n", "\n").split("\n"), start=1))
    begun = False
    for number, line in lines:
        if not begun and re.match(r"#\s*escape\s*=", line.strip(), re.I):
            raise BadSource(f"Dockerfile line {number}: escape is set", hint="only the backslash continues a line")
        if _is_silent(line):
            continue
        begun = True
        yield _with_documents(_instruction(number, _joined(line.lstrip(), lines)), lines)


def _is_silent(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _joined(line: str, lines: Iterator[tuple[int, str]]) -> str:
    """A line and those that it goes on in."""
    parts = []
    while found := _CONTINUED.fullmatch(line):
        parts.append(found[1])
        line = next((following for _, following in lines if not _is_silent(following)), "")
    return "".join([*parts, line]).strip()


def _instruction(line: int, text: str) -> Instruction:
    name, rest = (*re.split(r"\s+", text, maxsplit=1), "")[:2]
    bare = Instruction(line, name.upper(), {}, (), False)
    if bare.name == "ONBUILD":
        raise bare.error("ONBUILD is not supported", "write the instruction where the image is used")
    if bare.name not in INSTRUCTIONS:
        raise bare.error(f"no instruction {name[:40]!r}", nearest(bare.name, INSTRUCTIONS))
    flags, rest = _flags(bare, rest)
    if not rest:
        raise bare.error(f"{bare.name} of nothing", "say what")
    words = _json_list(rest) if bare.name in _TAKES_JSON else None
    if bare.name == "SHELL" and words is None:
        raise bare.error("SHELL is no list", 'write SHELL ["/bin/bash", "-c"]')
    if bare.name not in ("RUN", "CMD", "ENTRYPOINT", "SHELL", *MEANINGLESS) and (odd := unsupported(rest)):
        raise bare.error(f"{odd[:60]!r} is not supported", "write ${NAME}, ${NAME:-default} or ${NAME:+other}")
    return Instruction(line, bare.name, flags, (rest,) if words is None else words, words is not None)


def _flags(bare: Instruction, rest: str) -> tuple[dict[str, str], str]:
    """An instruction's flags, and the text after them."""
    flags: dict[str, str] = {}
    while bare.name in _FLAGS and (found := re.match(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)", rest)):
        name, value = found[1], found[2]
        if name not in _FLAGS[bare.name] or (value is None and name != "link"):
            known = ", ".join(f"--{flag}=..." for flag in _FLAGS[bare.name])
            raise bare.error(f"{bare.name} has no flag --{name[:40]}", f"there are {known}: leave others out")
        if name == "mount" and not re.search(r"(^|,)type=(cache|tmpfs)(,|$)", value):
            hint = "COPY what it needs; only type=cache and type=tmpfs are read, and are folders of the image"
            raise bare.error(f"RUN --mount={value[:60]} is not supported", hint)
        if name == "network" and value not in ("none", "default"):
            raise bare.error(f"RUN --network={value[:20]}", "it has no network of the host's: leave it out")
        flags[name] = value or ""
        rest = rest[found.end() :]
    return flags, rest.strip()


def _with_documents(at: Instruction, lines: Iterator[tuple[int, str]]) -> Instruction:
    """The same with the here-documents that its words begin, read from the lines that follow."""
    if at.name not in _TAKES_DOCUMENTS or at.is_exec:
        return at
    documents = []
    for word in raw_words(at.words[0]):
        if found := _DOCUMENT.fullmatch(word):
            strip = "\t" if found[1] else ""
            body: list[str] = []
            for _, line in lines:
                line = line.lstrip(strip) if strip else line
                if line == found[4]:
                    break
                body.append(f"{line}\n")
            else:
                raise at.error(f"the here-document {found[4][:40]} does not end", "end it by a line of its name alone")
            documents.append(Document(found[4], "".join(body), expands=not found[3]))
    return at._replace(documents=tuple(documents))


def _json_list(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None  # as Docker: it is the shell's
    if isinstance(words, list) and words and all(isinstance(word, str) and "\0" not in word for word in words):
        return tuple(words)
    return None


def _from(instruction: Instruction) -> tuple[str, str]:
    words = instruction.words[0].split()
    if len(words) == 3 and words[1].upper() == "AS" and re.fullmatch("[a-z][a-z0-9-_.]*", words[2].lower()):
        return words[0], words[2].lower()
    if len(words) != 1:
        raise instruction.error("FROM takes an image, and perhaps AS a name", "write FROM image AS name")
    return words[0], ""
