"""Images from Dockerfiles: stages become images of the store, one step after another.

Files are copied on this host; a RUN runs in a machine of the image so far, which gives back what it changed
(`changes`). Every step's key is over its parent, its words and its inputs' content, so a step that was taken before
leads at once to where it led then. What no name means afterwards is the cache, and `ImageStore.collect` takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from etude.environments.images.changes import Changing
from etude.environments.images.copies import Copies, Sources
from etude.environments.images.directory import open_folder
from etude.environments.images.dockerfile import MEANINGLESS, Dockerfile, Instruction, Stage, parse
from etude.environments.images.dockerfile_words import arguments as arguments_of
from etude.environments.images.dockerfile_words import expand, pairs, words_of
from etude.environments.images.layers import apply_layer
from etude.environments.images.limits import BadSource, too_large
from etude.environments.images.openat import open_in
from etude.environments.images.packed import unpacked
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import plain
from etude.environments.network.build_network import BuildNetwork
from etude.errors import InputError, MachineError, nearest
from etude.records.command import ExecResult
from etude.records.image import Image
from etude.seams import Runtime

_TAIL_BYTES = 2000  # of what a failed RUN printed
_SHELL = ("/bin/sh", "-c")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where no image says another


async def build_from_dockerfile(
    store: ImageStore,
    context: str | os.PathLike[str],
    *,
    dockerfile: str = "Dockerfile",
    arguments: Mapping[str, str] | None = None,
    target: str = "",
    runtime: Runtime | None = None,
    refused: str = "",
    run_deadline_s: float = 1800.0,
    outlets: BuildNetwork | None = None,
) -> ImageRecord:
    """The image that a Dockerfile in the folder `context` describes; its last stage, or the one named `target`.

    `runtime` has the machines that RUN needs (`refused`: why there is none), `outlets` what its commands reach: nothing
    where None. `BadSource` names the line that cannot be followed, or whose command
    failed, with the end of what it printed; `MachineError` is for machines that could not be had."""
    with open_folder(context) as root:
        text = _text_in(root, dockerfile, store.limits.document_bytes)
        if text is None:
            raise BadSource(f"no {dockerfile} in {context}", hint="name the folder that holds it")
        skip = ignored(_text_in(root, ".dockerignore", store.limits.document_bytes) or "")
        build = _Build(store, root, Sources(store, root, skip), parse(text, store.limits), arguments or {}, runtime)
        build.run_deadline_s, build.outlets, build.refused = run_deadline_s, outlets, refused
        return await build.stage(build.find(target) if target else build.file.stages[-1])


def _text_in(context: int, name: str, max_bytes: int) -> str | None:
    """The text of a regular file in an open folder; None where there is none. Links lead nowhere outside of it."""
    try:
        fd = open_in(context, name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with open(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise BadSource(f"{name} is too large", f"more than {max_bytes} bytes", hint="is it a Dockerfile?")
    return data.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class _State:
    """What instructions have led to so far. `key` stands for all of them and their inputs."""

    record: ImageRecord
    key: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = _SHELL

    @property
    def variables(self) -> dict[str, str]:
        """What the words of an instruction may name."""
        return {"PATH": _PATH, **self.arguments, **self.record.image.env}

    def argv(self, at: Instruction) -> tuple[str, ...]:
        """The command of a RUN, CMD or ENTRYPOINT: a list as it is, a text for the shell, with its here-documents."""
        if at.is_exec:
            return at.words
        text = at.words[0]
        if len(at.documents) == 1 and re.fullmatch(r"<<-?\S+", text):  # the document is the script
            return _of_script(at.documents[0].text, self.shell)
        return (*self.shell, "".join([text, *(f"\n{d.text}{d.name}\n" for d in at.documents)]))

    def then(self, *facts: object, **settings: object) -> _State:
        """The same with other settings of the image, and the facts that make it another step."""
        key = _key(self.key, *facts)
        of_image = {k: v for k, v in settings.items() if k in ("env", "workdir", "user")}
        others = {k: v for k, v in settings.items() if k not in of_image}
        image = msgspec.structs.replace(self.record.image, **of_image)
        return replace(self, record=msgspec.structs.replace(self.record, image=image, **others), key=key)


def _of_script(text: str, shell: tuple[str, ...]) -> tuple[str, ...]:
    """How a script is run: by what its first line names, else by the shell."""
    found = re.match(r"#!\s*(\S+)(?:[ \t]+(\S.*?))?[ \t]*\n", text)
    if found is None:
        return (*shell, text)
    file = 'printf %s "$0" >/tmp/script && exec "$@" /tmp/script'  # the machine's own /tmp, no part of the image
    return ("/bin/sh", "-c", file, text, found[1], *([found[2]] if found[2] else []))


def _key(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class _Build:
    """One build. Stages are built when something needs them, once."""

    run_deadline_s: float
    outlets: BuildNetwork | None
    refused: str

    def __init__(
        self,
        store: ImageStore,
        root: int,
        sources: Sources,
        file: Dockerfile,
        given: Mapping[str, str],
        runtime: Runtime | None,
    ) -> None:
        self.file, self._store, self._root, self._sources = file, store, root, sources
        self._given, self._runtime = given, runtime
        self._built: dict[str, ImageRecord] = {}  # by the line a stage begins at
        self._global = _platform()
        for at in file.arguments:
            self._global |= _known(arguments_of(at, given, self._global))
        declared = {
            name for at in (*file.arguments, *(i for stage in file.stages for i in stage.instructions))
            if at.name == "ARG" for name, _ in arguments_of(at, {}, {})
        }  # fmt: skip
        for name in given:
            if name not in declared:
                hint = nearest(name, declared) if declared else "it has none at all: leave it out"
                raise InputError(f"the Dockerfile has no ARG {name[:40]}", hint=hint)

    def find(self, name: str) -> Stage:
        for number, stage in enumerate(self.file.stages):
            if name.lower() in (stage.name, str(number)) and name:
                return stage
        known = [stage.name for stage in self.file.stages if stage.name]
        hint = nearest(name, known) if known else "none has a name: write FROM image AS name, or give its number"
        raise InputError(f"the Dockerfile has no stage {name!r}", hint=hint)

    async def stage(self, stage: Stage) -> ImageRecord:
        """A stage's image, built if it has not been."""
        at = str(stage.begin.line)
        if at not in self._built:
            self._built[at] = await self._build(stage)
        return self._built[at]

    async def _build(self, stage: Stage) -> ImageRecord:
        base = await self._base(stage)
        state = _State(base, _key("from", base.image.digest))
        waiting: list[Copies] = []  # steps on files that are not taken yet
        for instruction in stage.instructions:
            if instruction.name == "RUN":
                state = await asyncio.to_thread(self._take, state, waiting)
                state = await self._run(state, instruction)
            elif instruction.name in ("COPY", "ADD", "WORKDIR"):
                copies = await self._copies(stage, state, instruction)
                state = state.then(*copies.facts, **({"workdir": copies.to} if instruction.name == "WORKDIR" else {}))
                waiting.append(copies)
            else:
                state = self._setting(state, instruction)
        state = await asyncio.to_thread(self._take, state, waiting)
        made = (*base.made, *(f"{i.name} {' '.join(i.words)}"[:500] for i in stage.instructions))
        return msgspec.structs.replace(state.record, source="dockerfile", made=made)

    async def _base(self, stage: Stage) -> ImageRecord:
        name, platform = expand(stage.base, self._global), expand(stage.begin.flags.get("platform", ""), self._global)
        if platform and not platform.startswith(self._global["TARGETPLATFORM"]):
            hint = f"images here are for {self._global['TARGETPLATFORM']}: leave it out"
            raise stage.begin.error(f"FROM --platform={platform[:40]}", hint)
        earlier = self.file.stages[: self.file.stages.index(stage)]
        for other in earlier:
            if other.name == name.lower():
                return await self.stage(other)
        if name == "scratch":
            with self._store.building() as building:
                return building.keep(ImageRecord(image=Image(digest="", workdir="/"), source="dockerfile"))
        try:
            return self._store.get(name)
        except InputError as error:
            hint = f"build it first, from `docker save {name[:80]}` for instance, by --name {name[:80]}; {error.hint}"
            raise stage.begin.error(error.what, hint) from None

    def _setting(self, state: _State, at: Instruction) -> _State:
        record, variables = state.record, state.variables
        text = at.words[0]
        if at.name == "ENV":
            return state.then(at.name, found := pairs(at, variables), env={**record.image.env, **found})
        if at.name == "ARG":
            named = arguments_of(at, self._given, variables)
            known = _known((name, self._global.get(name) if value is None else value) for name, value in named)
            return replace(state.then(at.name, known), arguments={**state.arguments, **known})
        if at.name == "SHELL":
            return replace(state, shell=at.words)
        if at.name in MEANINGLESS:
            return state
        if at.name == "LABEL":
            return state.then(at.name, labels={**record.labels, **pairs(at, variables)})
        if at.name == "EXPOSE":
            return state.then(at.name, ports=(*record.ports, *words_of(at, variables)))
        if at.name == "USER":
            return state.then(at.name, user := expand(text, variables), user=user)
        return state.then(at.name, **{"command" if at.name == "CMD" else "entrypoint": state.argv(at)})

    async def _copies(self, stage: Stage, state: _State, at: Instruction) -> Copies:
        variables = state.variables
        if at.name == "WORKDIR":
            return self._sources.folder(at, _joined(state, expand(at.words[0], variables), at, self._store))
        words = words_of(at, variables)
        at = at._replace(
            flags={name: expand(value, variables) for name, value in at.flags.items()},
            documents=tuple(d._replace(text=expand(d.text, variables)) if d.expands else d for d in at.documents),
        )
        if len(words) < 2:
            raise at.error(f"{at.name} needs a source and a destination", f"write {at.name} SOURCE DESTINATION")
        digest = None
        if "from" in at.flags:
            digest = (await self._other(stage, at, at.flags["from"])).image.digest
        to = _joined(state, words[-1], at, self._store)
        into = words[-1].endswith(("/", "/.")) or words[-1] == "."
        names = [word for word in words[:-1] if not (at.documents and word.startswith("<<"))]
        return self._sources.copies(at, names, to, into=into, digest=digest)

    async def _other(self, stage: Stage, at: Instruction, name: str) -> ImageRecord:
        earlier = self.file.stages[: self.file.stages.index(stage)]
        for number, other in enumerate(earlier):
            if name.lower() in (other.name, str(number)):
                return await self.stage(other)
        try:
            return self._store.get(name)
        except InputError as error:
            raise at.error(f"COPY --from: {error.what}", "name an earlier stage, or an image of the store") from None

    def _take(self, state: _State, waiting: list[Copies]) -> _State:
        """Take the steps that wait, together; `state` is what they lead to but for its digest."""
        if not waiting:
            return state
        done = self._store.step(state.key)
        if done is None:
            with self._store.building(state.record.image.digest) as building:
                for copies in waiting:
                    copies.take(building.tree)
                done = building.keep(state.record)
            self._store.keep_step(state.key, done)
        waiting.clear()
        return _at(state, done)

    async def _run(self, state: _State, at: Instruction) -> _State:
        argv, image = list(state.argv(at)), state.record.image
        reached = () if self.outlets is None else (self.outlets.key,)
        state = state.then("RUN", argv, state.variables, image.workdir, image.user, *reached)
        done = self._store.step(state.key)
        if done is None:
            with self._store.scratch() as folder:
                await self._run_in_machine(at, argv, state, folder / "layer")
                done = await asyncio.to_thread(self._layered, folder / "layer", state.record)
            self._store.keep_step(state.key, done)
        return _at(state, done)

    def _layered(self, layer: Path, record: ImageRecord) -> ImageRecord:
        with self._store.building(record.image.digest) as building, open(layer, "rb") as file:
            apply_layer(unpacked(file, self._store.limits), building.tree)
            return building.keep(record)

    async def _run_in_machine(self, at: Instruction, argv: list[str], state: _State, layer: Path) -> None:
        if self._runtime is None or not self._runtime.info.images:
            name = "none" if self._runtime is None else self._runtime.info.name
            facts = self.refused or f"the runtime given is {name}"
            hint = "give one with images, or build from an image that has it done"
            raise MachineError(f"Dockerfile line {at.line}: RUN needs a machine of an image", facts, hint=hint)
        [machine] = await self._runtime.fork(await self._runtime.prepare({}, image=state.record.image), 1)
        try:
            async with contextlib.AsyncExitStack() as stack:
                reached: dict[str, str] = {}
                if self.outlets is not None:
                    reached = await stack.enter_async_context(self.outlets.open_in(machine, f"line {at.line}"))
                env = {**reached, **state.arguments}
                result = await machine.exec(argv, key="run", deadline_s=self.run_deadline_s, env=env)
            _require_success(at, result)
            if not isinstance(machine, Changing):
                facts = f"machines of {self._runtime.info.name} do not tell what was changed in them"
                raise MachineError(
                    f"Dockerfile line {at.line}: RUN has no result",
                    facts,
                    hint="use a runtime that keeps whole snapshots",
                )
            await _changes_of(machine, layer, self._store.limits.total_bytes)
        finally:
            await machine.close()


async def _changes_of(machine: Changing, to: Path, max_bytes: int) -> None:
    out = await asyncio.to_thread(open, to, "xb")
    try:
        await machine.changes(out, max_bytes=max_bytes)
    except ValueError as error:
        raise too_large(str(error), "total_bytes") from None
    finally:
        out.close()


def _require_success(at: Instruction, result: ExecResult) -> None:
    if result.exit_code != 0 or result.timed_out:
        how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
        printed = result.output[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise BadSource(f"Dockerfile line {at.line}: RUN {how}", printed, hint=_hint(result, printed))


def _hint(result: ExecResult, printed: str) -> str:
    """What to do about a RUN that failed."""
    if "File size limit exceeded" in printed:
        return "a file grew over what a machine may write: write smaller ones, or COPY it"
    if result.exit_code == 127 or "/bin/sh" in printed:
        return "the image lacks that program: FROM scratch has no /bin/sh; begin FROM an image with it, or COPY it"
    return "what the program printed says why; it has no network but --allow: COPY what it needs"


def _at(state: _State, done: ImageRecord) -> _State:
    image = msgspec.structs.replace(state.record.image, digest=done.image.digest)
    record = msgspec.structs.replace(
        state.record, image=image, parent=done.parent, num_files=done.num_files, num_bytes=done.num_bytes
    )
    return replace(state, record=record)


def _joined(state: _State, path: str, at: Instruction, store: ImageStore) -> str:
    """A path of a Dockerfile as an absolute one, relative ones from the working directory."""
    whole = path if path.startswith("/") else f"{state.record.image.workdir}/{path}"
    normal = os.path.normpath(f"/{whole}")
    try:
        return "/" + plain(normal, store.limits)
    except BadSource as error:
        raise at.error(error.what, error.hint) from None


def _platform() -> dict[str, str]:
    """The arguments that every build has: what it is for, which is what this host is."""
    machine = os.uname().machine
    name = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    facts = {"PLATFORM": f"linux/{name}", "OS": "linux", "ARCH": name}
    return {f"{who}{what}": value for who in ("TARGET", "BUILD") for what, value in facts.items()}


def _known(found: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    return {name: value for name, value in found if value is not None}


# ------------------------------------------------------------------------------------------------------- .dockerignore


MAX_LINES = 1_000


def ignored(text: str) -> Callable[[str], bool]:
    """Whether a path is left out, by the last line that says something about it or a folder above it. `BadSource` for
    too many lines.

    >>> skip = ignored("*.log\\n**/cache\\n!keep.log")
    >>> [skip(p) for p in ("a.log", "keep.log", "x/y/cache", "x/y/cache/z", "src/a.log", "a.py")]
    [True, False, True, True, False, False]
    """
    rules = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise BadSource(f".dockerignore has {len(lines)} lines", f"at most {MAX_LINES}", hint="use fewer patterns")
    for line in lines:
        line = line.strip()
        if line and not line.startswith("#"):
            keep, pattern = line.startswith("!"), line.removeprefix("!").strip().strip("/")
            rules.append((keep, re.compile(_expression(pattern) + "(?:/.*)?", re.DOTALL)))

    def skip(path: str) -> bool:
        out = False
        for keep, pattern in rules:
            if keep is out and pattern.fullmatch(path):
                out = not keep
        return out

    return skip


def _expression(pattern: str) -> str:
    """The regular expression of a pattern. Whoever wrote it may be hostile: no choice is made again that was made
    (atomic groups), but for where the last run begins and how long its last star is. That is right, as the first place
    where a run can end leaves what comes after it the most room."""
    pattern = re.sub(r"(?:\*\*/)+", "**/", re.sub(r"\*{3,}", "**", pattern))  # the same, without the choices
    found = re.split(r"(\*\*/?)", pattern)  # runs, and what is between them
    expression = _run(found[0], last=len(found) == 1)
    for at in range(1, len(found), 2):
        before, between, run, last = found[at - 1], found[at], found[at + 1], at + 2 == len(found)
        is_folders = between == "**/" and (before.endswith("/") or (at == 1 and not before))
        run = f"/{run}" if between == "**/" and not is_folders else run
        skipped = "(?:[^/]+/)*?" if is_folders else ".*?"
        if last:
            expression += f"{skipped}{_run(run, last=True)}(?=/|\\Z)" if run else ".*"
        else:
            expression += f"(?>{skipped}{_run(run, last=False)})"
    return expression


def _run(run: str, *, last: bool) -> str:
    """What stands between the wildcards that go over several folders."""
    head, *rest = ("".join("[^/]" if c == "?" else re.escape(c) for c in part) for part in run.split("*"))
    final = f"[^/]*{rest.pop()}" if rest and last else ""
    return head + "".join(f"(?>[^/]*?{part})" for part in rest) + final
