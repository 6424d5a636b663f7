"""Build images from Dockerfiles.

COPY and ADD run on this host. A RUN step runs in a machine with the image so far, which then exports its changes
(`layers.ChangeExporter`). Each step is cached under a hash of its parent, its arguments and the content of its inputs.
The image after each step has no name and serves as build cache; `ImageStore.collect` deletes such images.
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

from etude.environments.images.decompression import decompressed
from etude.environments.images.directory import open_folder
from etude.environments.images.dockerfile import (
    NO_EFFECT,
    Dockerfile,
    Instruction,
    Stage,
    args_of,
    arguments_of,
    expand,
    pairs,
    parse,
)
from etude.environments.images.dockerfile_copy import CopySources, CopyStep
from etude.environments.images.layers import ChangeExporter, apply_layer
from etude.environments.images.limits import BadSource, too_large
from etude.environments.images.openat import open_in
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import normalize_path
from etude.environments.network.build_network import BuildNetwork
from etude.errors import InputError, MachineError, nearest
from etude.records.command import ExecResult
from etude.records.image import Image
from etude.seams import Runtime

_TAIL_BYTES = 2000  # of the output of a failed RUN, for its error
_SHELL = ("/bin/sh", "-c")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # the default if the image sets none


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
    """Build an image from a Dockerfile in the folder `context`, and return its record.

    `arguments` are values of ARG instructions. `target` names the stage to build; "" is the last one. `runtime` starts
    the machines for RUN steps; without a runtime that supports images, a RUN step raises `MachineError`, with `refused`
    as the reason why there is none. Each RUN step may take `run_deadline_s` seconds. `outlets` is the network that RUN
    steps can reach; None: no network.

    Raises `BadSource` for an invalid instruction or failed command, with its line and the end of its output;
    `InputError` for unknown arguments or stages; `MachineError` if no machine can be made."""
    with open_folder(context) as root:
        text = _text_in(root, dockerfile, store.limits.document_bytes)
        if text is None:
            raise BadSource(f"no {dockerfile} in {context}", hint="name the folder that contains it")
        skip = ignored(_text_in(root, ".dockerignore", store.limits.document_bytes) or "")
        build = _Build(store, root, CopySources(store, root, skip), parse(text, store.limits), arguments or {}, runtime)
        build.run_deadline_s, build.outlets, build.refused = run_deadline_s, outlets, refused
        return await build.stage(build.find(target) if target else build.file.stages[-1])


def _text_in(context: int, name: str, max_bytes: int) -> str | None:
    """Read a regular text file in an open folder; None if there is none. Links never lead out of the folder."""
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
        raise BadSource(f"{name} is too large", f"more than {max_bytes} bytes", hint="check that it is a Dockerfile")
    return data.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class _State:
    """The state of a build after some instructions. `key`: a hash of all of them and their inputs."""

    record: ImageRecord
    key: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = _SHELL

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": _PATH, **self.arguments, **self.record.image.env}

    def argv(self, at: Instruction) -> tuple[str, ...]:
        """The command line of a RUN, CMD or ENTRYPOINT. Shell form is passed to the shell, with its here-documents."""
        if at.is_exec:
            return at.args
        text = at.args[0]
        if len(at.documents) == 1 and re.fullmatch(r"<<-?\S+", text):  # the document is the script
            return _of_script(at.documents[0].text, self.shell)
        return (*self.shell, "".join([text, *(f"\n{d.text}{d.name}\n" for d in at.documents)]))

    def then(self, *facts: object, **settings: object) -> _State:
        """The next state: changed image settings, and a key that includes `facts`."""
        key = _key(self.key, *facts)
        of_image = {k: v for k, v in settings.items() if k in ("env", "workdir", "user")}
        others = {k: v for k, v in settings.items() if k not in of_image}
        image = msgspec.structs.replace(self.record.image, **of_image)
        return replace(self, record=msgspec.structs.replace(self.record, image=image, **others), key=key)


def _of_script(text: str, shell: tuple[str, ...]) -> tuple[str, ...]:
    """The command line that runs a script: with the program in its first line, else with the shell."""
    found = re.match(r"#!\s*(\S+)(?:[ \t]+(\S.*?))?[ \t]*\n", text)
    if found is None:
        return (*shell, text)
    file = 'printf %s "$0" >/tmp/script && exec "$@" /tmp/script'  # /tmp of the machine, which is not part of the image
    return ("/bin/sh", "-c", file, text, found[1], *([found[2]] if found[2] else []))


def _key(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class _Build:
    """One build. Each stage is built once, when it is needed."""

    run_deadline_s: float
    outlets: BuildNetwork | None
    refused: str

    def __init__(
        self,
        store: ImageStore,
        root: int,
        sources: CopySources,
        file: Dockerfile,
        build_args: Mapping[str, str],
        runtime: Runtime | None,
    ) -> None:
        self.file, self._store, self._root, self._sources = file, store, root, sources
        self._build_args, self._runtime = build_args, runtime
        self._built: dict[str, ImageRecord] = {}  # by the line of the stage's FROM
        self._global = _platform()
        for at in file.arguments:
            self._global |= _without_none(arguments_of(at, build_args, self._global))
        declared = {
            name for at in (*file.arguments, *(i for stage in file.stages for i in stage.instructions))
            if at.name == "ARG" for name, _ in arguments_of(at, {}, {})
        }  # fmt: skip
        for name in build_args:
            if name not in declared:
                hint = nearest(name, declared) if declared else "it has no ARG: leave it out"
                raise InputError(f"the Dockerfile has no ARG {name[:40]}", hint=hint)

    def find(self, name: str) -> Stage:
        for number, stage in enumerate(self.file.stages):
            if name.lower() in (stage.name, str(number)) and name:
                return stage
        known = [stage.name for stage in self.file.stages if stage.name]
        hint = nearest(name, known) if known else "no stage has a name: write FROM image AS name, or use its number"
        raise InputError(f"the Dockerfile has no stage {name!r}", hint=hint)

    async def stage(self, stage: Stage) -> ImageRecord:
        """Return the image of a stage; builds it on the first call."""
        at = str(stage.begin.line)
        if at not in self._built:
            self._built[at] = await self._build(stage)
        return self._built[at]

    async def _build(self, stage: Stage) -> ImageRecord:
        base = await self._base(stage)
        state = _State(base, _key("from", base.image.digest))
        waiting: list[CopyStep] = []  # COPY, ADD and WORKDIR steps that are not applied yet
        for instruction in stage.instructions:
            if instruction.name == "RUN":
                state = await asyncio.to_thread(self._apply, state, waiting)
                state = await self._run(state, instruction)
            elif instruction.name in ("COPY", "ADD", "WORKDIR"):
                copies = await self._copies(stage, state, instruction)
                state = state.then(*copies.facts, **({"workdir": copies.to} if instruction.name == "WORKDIR" else {}))
                waiting.append(copies)
            else:
                state = self._setting(state, instruction)
        state = await asyncio.to_thread(self._apply, state, waiting)
        made = (*base.made, *(f"{i.name} {' '.join(i.args)}"[:500] for i in stage.instructions))
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
            with self._store.new_image() as building:
                return building.commit(ImageRecord(image=Image(digest="", workdir="/"), source="dockerfile"))
        try:
            return self._store.get(name)
        except InputError as error:
            hint = f"build it first, for instance from `docker save {name[:80]}`, with --name {name[:80]}; {error.hint}"
            raise stage.begin.error(error.what, hint) from None

    def _setting(self, state: _State, at: Instruction) -> _State:
        record, variables = state.record, state.variables
        text = at.args[0]
        if at.name == "ENV":
            return state.then(at.name, found := pairs(at, variables), env={**record.image.env, **found})
        if at.name == "ARG":
            named = arguments_of(at, self._build_args, variables)
            known = _without_none((name, self._global.get(name) if value is None else value) for name, value in named)
            return replace(state.then(at.name, known), arguments={**state.arguments, **known})
        if at.name == "SHELL":
            return replace(state, shell=at.args)
        if at.name in NO_EFFECT:
            return state
        if at.name == "LABEL":
            return state.then(at.name, labels={**record.labels, **pairs(at, variables)})
        if at.name == "EXPOSE":
            return state.then(at.name, ports=(*record.ports, *args_of(at, variables)))
        if at.name == "USER":
            return state.then(at.name, user := expand(text, variables), user=user)
        return state.then(at.name, **{"command" if at.name == "CMD" else "entrypoint": state.argv(at)})

    async def _copies(self, stage: Stage, state: _State, at: Instruction) -> CopyStep:
        variables = state.variables
        if at.name == "WORKDIR":
            return self._sources.folder(at, _absolute(state, expand(at.args[0], variables), at, self._store))
        args = args_of(at, variables)
        at = at._replace(
            flags={name: expand(value, variables) for name, value in at.flags.items()},
            documents=tuple(d._replace(text=expand(d.text, variables)) if d.expands else d for d in at.documents),
        )
        if len(args) < 2:
            raise at.error(f"{at.name} needs a source and a destination", f"write {at.name} SOURCE DESTINATION")
        digest = None
        if "from" in at.flags:
            digest = (await self._other(stage, at, at.flags["from"])).image.digest
        to = _absolute(state, args[-1], at, self._store)
        into = args[-1].endswith(("/", "/.")) or args[-1] == "."
        names = [word for word in args[:-1] if not (at.documents and word.startswith("<<"))]
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

    def _apply(self, state: _State, waiting: list[CopyStep]) -> _State:
        """Apply the waiting steps together. `state`: the state after them, except for its digest."""
        if not waiting:
            return state
        done = self._store.cached_step(state.key)
        if done is None:
            with self._store.new_image(state.record.image.digest) as building:
                for copies in waiting:
                    copies.apply(building.tree)
                done = building.commit(state.record)
            self._store.cache_step(state.key, done)
        waiting.clear()
        return _at(state, done)

    async def _run(self, state: _State, at: Instruction) -> _State:
        argv, image = list(state.argv(at)), state.record.image
        reached = () if self.outlets is None else (self.outlets.key,)
        state = state.then("RUN", argv, state.variables, image.workdir, image.user, *reached)
        done = self._store.cached_step(state.key)
        if done is None:
            with self._store.scratch() as folder:
                await self._run_in_machine(at, argv, state, folder / "layer")
                done = await asyncio.to_thread(self._layered, folder / "layer", state.record)
            self._store.cache_step(state.key, done)
        return _at(state, done)

    def _layered(self, layer: Path, record: ImageRecord) -> ImageRecord:
        with self._store.new_image(record.image.digest) as building, open(layer, "rb") as file:
            apply_layer(decompressed(file, self._store.limits), building.tree)
            return building.commit(record)

    async def _run_in_machine(self, at: Instruction, argv: list[str], state: _State, layer: Path) -> None:
        if self._runtime is None or not self._runtime.info.images:
            name = "none" if self._runtime is None else self._runtime.info.name
            facts = self.refused or f"the runtime is {name}"
            hint = "use a runtime with images, or build from an image in which this step is done"
            raise MachineError(f"Dockerfile line {at.line}: RUN needs a machine with the image", facts, hint=hint)
        [machine] = await self._runtime.fork(await self._runtime.prepare({}, image=state.record.image), 1)
        try:
            async with contextlib.AsyncExitStack() as stack:
                reached: dict[str, str] = {}
                if self.outlets is not None:
                    reached = await stack.enter_async_context(self.outlets.open_in(machine, f"line {at.line}"))
                env = {**reached, **state.arguments}
                result = await machine.exec(argv, key="run", deadline_s=self.run_deadline_s, env=env)
            _require_success(at, result)
            if not isinstance(machine, ChangeExporter):
                facts = f"machines of {self._runtime.info.name} cannot export their changes"
                raise MachineError(
                    f"Dockerfile line {at.line}: RUN has no result", facts, hint="use a runtime with full snapshots"
                )
            await _changes_of(machine, layer, self._store.limits.total_bytes)
        finally:
            await machine.close()


async def _changes_of(machine: ChangeExporter, to: Path, max_bytes: int) -> None:
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
    if "File size limit exceeded" in printed:
        return "a file exceeded the size limit of machines: write smaller files, or COPY it"
    if result.exit_code == 127 or "/bin/sh" in printed:
        return "the image lacks this program (FROM scratch has no /bin/sh): use an image that has it, or COPY it"
    return "see the output above; RUN has no network except --allow: COPY what it needs"


def _at(state: _State, done: ImageRecord) -> _State:
    image = msgspec.structs.replace(state.record.image, digest=done.image.digest)
    record = msgspec.structs.replace(
        state.record, image=image, parent=done.parent, num_files=done.num_files, num_bytes=done.num_bytes
    )
    return replace(state, record=record)


def _absolute(state: _State, path: str, at: Instruction, store: ImageStore) -> str:
    """Make a path absolute; relative paths start at the working directory of the image."""
    whole = path if path.startswith("/") else f"{state.record.image.workdir}/{path}"
    normal = os.path.normpath(f"/{whole}")
    try:
        return "/" + normalize_path(normal, store.limits)
    except BadSource as error:
        raise at.error(error.what, error.hint) from None


def _platform() -> dict[str, str]:
    """The predefined build arguments: target and build platform, both this host."""
    machine = os.uname().machine
    name = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    facts = {"PLATFORM": f"linux/{name}", "OS": "linux", "ARCH": name}
    return {f"{who}{what}": value for who in ("TARGET", "BUILD") for what, value in facts.items()}


def _without_none(found: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    return {name: value for name, value in found if value is not None}


MAX_LINES = 1_000


def ignored(text: str) -> Callable[[str], bool]:
    """Parse the text of a .dockerignore file, and return a function that tells whether a path is ignored.

    The last line that matches the path or a parent folder decides. Raises `BadSource` for more than `MAX_LINES` lines.

    >>> skip = ignored("*.log\\n**/cache\\n!keep.log")
    >>> [skip(p) for p in ("a.log", "keep.log", "x/y/cache", "x/y/cache/z", "src/a.log", "a.py")]
    [True, False, True, True, False, False]
    """
    rules = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise BadSource(
            f".dockerignore has {len(lines)} lines", f"at most {MAX_LINES} are allowed", hint="use fewer patterns"
        )
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
    """Convert a .dockerignore pattern to a regular expression that cannot backtrack exponentially.

    Patterns are untrusted. So all groups are atomic, except for the start of the last run (a part without ``**``) and
    the length of its last star. This is correct because the earliest end of a run leaves the most text for the rest."""
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
    """Convert a part of a pattern without ``**``."""
    head, *rest = ("".join("[^/]" if c == "?" else re.escape(c) for c in part) for part in run.split("*"))
    final = f"[^/]*{rest.pop()}" if rest and last else ""
    return head + "".join(f"(?>[^/]*?{part})" for part in rest) + final
