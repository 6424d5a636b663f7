"""Where vLLM lives: a virtual environment of its own, complete or absent, of a version that the adapter was tested
with.

vLLM wants its own torch and some 170 packages; none of them is loaded by etude, and of etude only the package itself is
importable there, by a folder that holds nothing but a link to it.
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

MARK = "etude-engine.json"
VARIABLE = "ETUDE_VLLM"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The file that the last step of an install writes: without it there is no environment."""

    vllm: str
    device: str


@dataclass(frozen=True)
class Environment:
    """A virtual environment that may hold vLLM.

    >>> Environment(Path("/nowhere")).mark is None
    True
    """

    folder: Path

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
        """vLLM's version by its metadata, which needs no start of it; None where it is not there."""
        for found in sorted(self.folder.glob("lib/python3*/site-packages/vllm*.dist-info/METADATA")):
            if named := re.search(r"^Name: vllm(?:[-_]cpu)?$", text := found.read_text(errors="replace"), re.MULTILINE):
                told = re.search(r"^Version: ([^\s+]+)", text[named.end() :], re.MULTILINE)
                return told[1] if told else None
        return None

    def require(self) -> Mark:
        """What is there. Raises `EngineError` unless it is a whole one, of a tested version."""
        mark, version = self.mark, self.version
        if mark is None or version is None:
            state = f"{self.folder} holds none" if not self.folder.exists() else f"{self.folder} is not complete"
            raise EngineError(
                "vLLM is not installed",
                state,
                hint=f"etude engines install vllm; or name another environment by {VARIABLE} or vllm.environment",
            )
        if version != required_version():
            raise EngineError(
                f"vLLM {version} in {self.folder} was not tested",
                f"this etude works with vLLM {required_version()}: endpoints and the packing of weights differ between"
                " versions, and wrong weights answer as if all were well",
                hint="etude engines install vllm --folder ANOTHER, and name that one; or take it away first",
            )
        return mark


def environment(folder: Path | None = None) -> Environment:
    """The one in `folder`, or by the environment variable, or the user's."""
    named = os.environ.get(VARIABLE)
    return Environment((folder or (Path(named) if named else default_folder())).expanduser().absolute())


def default_folder() -> Path:
    """In the user's cache: it can be installed again."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "etude" / "engines" / f"vllm-{required_version()}"


@cache
def pins() -> dict[str, Any]:
    """What pins.toml says."""
    return tomllib.loads(resources.files("etude.inference.vllm").joinpath("pins.toml").read_text())


def required_version() -> str:
    return str(pins()["vllm"])


def link_package(folder: Path) -> Path:
    """A folder for PYTHONPATH, made in `folder`, in which there is etude and nothing of what is installed beside it."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    (path / "etude").unlink(missing_ok=True)
    (path / "etude").symlink_to(Path(etude.__file__).parent, target_is_directory=True)
    return path
