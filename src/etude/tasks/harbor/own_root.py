"""Harbor tasks without an image: if a Dockerfile only copies files, the task uses the runtime's own root filesystem.

Such machines have one writable folder. The fixed paths of a container (its working directory, ``/tests``,
``/solution``, ``/logs``) are placed below that folder, and these paths are rewritten in all texts of the task. `etude
tasks check` validates the result like any task.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.errors import TaskError
from etude.tasks.text_files import read_text, refuse_link

HIDDEN = ".harbor"
WORK = "/workspace"
_COPYING = ("FROM", "WORKDIR", "COPY", "ENV", "CMD", "LABEL", "EXPOSE")


@dataclass(frozen=True)
class OwnRoot:
    """The files that a Dockerfile copies into its working directory, for a machine without an image.

    `files` maps paths relative to `workdir`, the working directory of the container, to texts."""

    files: dict[str, str]
    workdir: str

    def moved(self, text: str) -> str:
        """Rewrite the paths of the container in a text to paths in a machine.

        >>> OwnRoot({}, "/app").moved("cat /app/a.txt > /logs/verifier/reward.txt # /application")
        'cat /workspace/a.txt > /workspace/.harbor/logs/verifier/reward.txt # /application'
        """
        places = {name: f"{WORK}/{HIDDEN}/{name}" for name in ("tests", "solution", "logs")}
        if self.workdir.strip("/"):
            places[self.workdir.strip("/")] = WORK
        names = "|".join(re.escape(name) for name in sorted(places, key=len, reverse=True))
        return re.sub(rf"(?<![\w./~-])/({names})(?![\w-])", lambda match: places[match[1]], text)

    def moved_files(self, files: Mapping[str, str]) -> dict[str, str]:
        """Apply `moved` to the text of each file; the paths stay the same."""
        return {path: self.moved(text) for path, text in files.items()}


def own_root(folder: Path) -> OwnRoot:
    """Read the Dockerfile of the Harbor task in `folder`, and the files that it copies.

    In the texts, paths of the container are rewritten already. Raises `TaskError` if there is no Dockerfile, or if the
    task needs an image because the Dockerfile does more than copy files into its working directory."""
    refuse_link(folder / "environment")
    path = folder / "environment" / "Dockerfile"
    if not path.is_file():
        raise TaskError(f"{folder} has no environment/Dockerfile", hint="give an image: see --images")
    lines = re.sub(r"\\\n", " ", read_text(path)).split("\n")
    workdir, files = "/", dict[str, str]()
    for number, line in enumerate(lines, start=1):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if name.upper() not in _COPYING or "--from" in rest or "<<" in rest:
            hint = "build its image: `etude tasks check ... --images STORE`"
            raise TaskError(f"{path}, line {number}: {name} needs an image", line.strip()[:80], hint=hint)
        if name.upper() == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip()))
        elif name.upper() == "COPY":
            _copy(folder / "environment", rest, workdir, files, f"{path}, line {number}")
    if workdir == "/":
        raise TaskError(
            f"{path} sets no WORKDIR", "its files would be in the root folder", hint="build its image: see --images"
        )
    inside = {place: text for place, text in files.items() if place.startswith(f"{workdir}/")}
    if outside := sorted(set(files) - set(inside)):
        raise TaskError(f"{path} copies to {outside[0]}", f"outside {workdir}", hint="build its image: see --images")
    root = OwnRoot({}, workdir)
    return OwnRoot({p[len(workdir) + 1 :]: root.moved(text) for p, text in inside.items()}, workdir)


def _copy(context: Path, rest: str, workdir: str, files: dict[str, str], place: str) -> None:
    try:
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
    except ValueError as error:
        raise TaskError(place, str(error), hint="correct the COPY line") from None
    if len(words) < 2:
        raise TaskError(place, "COPY needs a source and a target", hint="correct the COPY line")
    *sources, target = words
    for source in sources:
        path = (context / source.lstrip("/")).resolve()
        if not path.is_relative_to(context.resolve()):
            raise TaskError(place, f"{source} is outside environment/", hint="copy only files below environment/")
        into = posixpath.normpath(posixpath.join(workdir, target))
        if path.is_dir():
            for one in sorted(path.rglob("*")):
                if one.is_file() and not one.is_symlink() and one.name != "Dockerfile":
                    files[f"{into}/{one.relative_to(path).as_posix()}"] = read_text(one)
        elif path.is_file():
            is_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
            files[f"{into}/{path.name}" if is_folder else into] = read_text(path)
        else:
            raise TaskError(place, f"{source} does not exist in environment/", hint="correct the COPY line")
