"""Where a server of another make lives: a virtual environment of its own, complete or absent, of a version that the
adapter was written for.

Such a server wants its own torch and some 170 packages; none of them is loaded by etude, and of etude only the package
itself is importable there, by a folder that holds nothing but a link to it.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

import etude
from etude.errors import EngineError
from etude.inference.config import EngineKind

MARK = "etude-engine.json"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The file that the last step of an install writes: without it there is no environment."""

    device: str


@dataclass(frozen=True)
class ServerKind:
    """A kind of server.

    >>> VLLM.variable, VLLM.version
    ('ETUDE_VLLM', '0.32.0')
    """

    name: str  # as it calls itself
    why: str  # another version is refused

    @property
    def key(self) -> str:
        """In commands, folders and variables."""
        return self.name.lower()

    @property
    def variable(self) -> str:
        return f"ETUDE_{self.key.upper()}"

    @property
    def pins(self) -> dict[str, Any]:
        """What its pins.toml says."""
        return pins(self.key)

    @property
    def version(self) -> str:
        """The one that the adapter was written for."""
        return str(self.pins["version"])

    @property
    def default_folder(self) -> Path:
        """In the user's cache: it can be installed again."""
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache_home / "etude" / "engines" / f"{self.key}-{self.version}"


VLLM = ServerKind(
    "vLLM", "endpoints and the packing of weights differ between versions, and wrong weights answer as if well"
)
SGLANG = ServerKind("SGLang", "what it answers was read in that version's source, and changes from release to release")
SERVER_KINDS = {EngineKind.VLLM: VLLM, EngineKind.SGLANG: SGLANG}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that may hold a server.

    >>> Environment(Path("/nowhere")).mark is None
    True
    """

    folder: Path
    kind: ServerKind = VLLM

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def mark(self) -> Mark | None:
        """What was installed, to its end; None where nothing was."""
        try:
            return msgspec.json.decode((self.folder / MARK).read_bytes(), type=Mark)
        except (OSError, ValueError):
            return None

    @property
    def version(self) -> str | None:
        """The server's version by its metadata, which needs no start of it; None where it is not there."""
        key = self.kind.key
        for found in sorted(self.folder.glob(f"lib/python3*/site-packages/{key}*.dist-info/METADATA")):
            if named := re.search(
                rf"^Name: {key}(?:[-_]cpu)?$", text := found.read_text(errors="replace"), re.MULTILINE
            ):
                told = re.search(r"^Version: ([^\s+]+)", text[named.end() :], re.MULTILINE)
                return told[1] if told else None
        return None

    def require(self) -> Mark:
        """What is there. Raises `EngineError` unless it is a whole one, of the adapter's version."""
        mark, version, kind = self.mark, self.version, self.kind
        if mark is None or version is None:
            state = f"{self.folder} holds none" if not self.folder.exists() else f"{self.folder} is not complete"
            raise EngineError(
                f"{kind.name} is not installed",
                state,
                hint=f"etude engines install {kind.key}; or name another environment by {kind.variable} or"
                f" {kind.key}.environment",
            )
        if version != kind.version:
            raise EngineError(
                f"{kind.name} {version} in {self.folder} was not tested",
                f"this etude works with {kind.name} {kind.version}: {kind.why}",
                hint=f"etude engines install {kind.key} --folder ANOTHER, and name that one; or take it away first",
            )
        return mark


def environment(folder: Path | None = None, kind: ServerKind = VLLM) -> Environment:
    """The one in `folder`, or by the environment variable, or the user's."""
    named = os.environ.get(kind.variable)
    return Environment((folder or (Path(named) if named else kind.default_folder)).expanduser().absolute(), kind)


@cache
def pins(key: str) -> dict[str, Any]:
    """What the pins.toml of a make says."""
    return tomllib.loads(resources.files(f"etude.inference.{key}").joinpath("pins.toml").read_text())


def link_package(folder: Path) -> Path:
    """A folder for PYTHONPATH, made in `folder`, in which there is etude and nothing of what is installed beside it."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    (path / "etude").unlink(missing_ok=True)
    (path / "etude").symlink_to(Path(etude.__file__).parent, target_is_directory=True)
    return path
