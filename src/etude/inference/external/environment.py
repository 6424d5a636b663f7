"""The virtual environment of an external server: where it is, and whether it is complete and of the tested version.

The server needs its own torch and some 170 packages. etude loads none of them. In the server's environment only the
etude package itself can be imported, through a folder with a link to it."""

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
    """The content of the marker file that the last step of an installation writes.

    `device`: "cpu" or "cuda", the device that the server was installed for.

    Without the file the environment is incomplete."""

    device: str


@dataclass(frozen=True)
class ServerKind:
    """A kind of external server: `VLLM` or `SGLANG`.

    `name` is for display. `why` says why only one version of the server is accepted.

    >>> VLLM.variable, VLLM.version
    ('ETUDE_VLLM', '0.32.0')
    """

    name: str  # display name
    why: str  # why other versions are refused

    @property
    def key(self) -> str:
        """The name of this kind of server in lower case, for commands, folders and config sections."""
        return self.name.lower()

    @property
    def variable(self) -> str:
        """The environment variable that names an installation."""
        return f"ETUDE_{self.key.upper()}"

    @property
    def pins(self) -> dict[str, Any]:
        """The content of this kind's pins.toml: version, packages, and installation steps."""
        return pins(self.key)

    @property
    def version(self) -> str:
        """The only version of the server that this version of etude accepts (`Environment.require`)."""
        return str(self.pins["version"])

    @property
    def default_folder(self) -> Path:
        """The default folder of the environment, in the user's cache."""
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache_home / "etude" / "engines" / f"{self.key}-{self.version}"


VLLM = ServerKind(
    "vLLM", "endpoints and the packing of weights differ between versions, and wrong weights cause no error"
)
SGLANG = ServerKind("SGLang", "the format of its responses changes from release to release")
SERVER_KINDS = {EngineKind.VLLM: VLLM, EngineKind.SGLANG: SGLANG}


@dataclass(frozen=True)
class Environment:
    """The virtual environment in `folder` for a server of this kind. It may be missing or incomplete.

    >>> Environment(Path("/nowhere")).mark is None
    True
    """

    folder: Path
    kind: ServerKind = VLLM

    @property
    def python(self) -> Path:
        """The Python interpreter of the environment."""
        return self.folder / "bin" / "python"

    @property
    def mark(self) -> Mark | None:
        """The marker of a complete installation; None when the environment is missing or incomplete."""
        try:
            return msgspec.json.decode((self.folder / MARK).read_bytes(), type=Mark)
        except (OSError, ValueError):
            return None

    @property
    def version(self) -> str | None:
        """The server's version from its package metadata; None when it is not installed."""
        key = self.kind.key
        for metadata_file in sorted(self.folder.glob(f"lib/python3*/site-packages/{key}*.dist-info/METADATA")):
            if name_line := re.search(
                rf"^Name: {key}(?:[-_]cpu)?$", text := metadata_file.read_text(errors="replace"), re.MULTILINE
            ):
                version = re.search(r"^Version: ([^\s+]+)", text[name_line.end() :], re.MULTILINE)
                return version[1] if version else None
        return None

    def require(self) -> Mark:
        """Return the marker. Raises `EngineError` unless the installation is complete and of the tested version."""
        mark, version, kind = self.mark, self.version, self.kind
        if mark is None or version is None:
            state = f"{self.folder} does not exist" if not self.folder.exists() else f"{self.folder} is incomplete"
            raise EngineError(
                f"{kind.name} is not installed",
                state,
                hint=f"etude engines install {kind.key}; or name another environment with {kind.variable} or"
                f" {kind.key}.environment",
            )
        if version != kind.version:
            raise EngineError(
                f"{kind.name} {version} in {self.folder} was not tested",
                f"this version of etude works with {kind.name} {kind.version}: {kind.why}",
                hint=f"etude engines install {kind.key} --folder ANOTHER, and use that one; or delete this one first",
            )
        return mark


def environment(folder: Path | None = None, kind: ServerKind = VLLM) -> Environment:
    """Return the environment in `folder`.

    Without `folder` it is the one that the environment variable `kind.variable` names, or else the one in
    `kind.default_folder`."""
    from_variable = os.environ.get(kind.variable)
    return Environment((folder or Path(from_variable or kind.default_folder)).expanduser().absolute(), kind)


@cache
def pins(key: str) -> dict[str, Any]:
    """Read the pins.toml of a kind of server, "vllm" or "sglang": version, packages, and installation steps."""
    return tomllib.loads(resources.files(f"etude.inference.{key}").joinpath("pins.toml").read_text())


def link_package(folder: Path) -> Path:
    """Create a folder for PYTHONPATH, below `folder`, with a link to the etude package and nothing else.

    Returns its path."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    (path / "etude").unlink(missing_ok=True)
    (path / "etude").symlink_to(Path(etude.__file__).parent, target_is_directory=True)
    return path
