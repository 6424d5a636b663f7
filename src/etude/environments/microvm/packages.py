"""Resolve and download Debian packages with apt, using a separate state folder, so the host's apt is not involved.

Dependencies are resolved for an empty system without recommended packages. apt verifies the signatures of the mirror.
Existing files are not downloaded again, and a broken download is resumed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.errors import MachineError

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRRORS = ("http://deb.debian.org/debian bookworm", "http://deb.debian.org/debian-security bookworm-security")
_TOOLS = {"apt-get": "apt", "dpkg-deb": "dpkg"}
_DEADLINE_S = 900.0

Log = Callable[[str], None]


class Package(NamedTuple):
    """A downloaded Debian package. `path`: its .deb file."""

    name: str
    version: str
    sha256: str
    path: Path


def require(tools: dict[str, str]) -> None:
    """Raise `MachineError` if a program is not installed. `tools`: program name to the Debian package that contains
    it."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        packages = " ".join(sorted({tools[tool] for tool in missing}))
        raise MachineError(
            f"{', '.join(missing)} not found", "they are needed to build images", hint=f"install: {packages}"
        )


def run(command: Sequence[str], what: str, *, deadline_s: float, env: dict[str, str] | None = None) -> bytes:
    """Run a program and return its standard output.

    `what`: the purpose of the program, as the subject of errors, such as "resolving packages". `env`: further
    environment variables. Raises `MachineError` if it fails or takes longer than `deadline_s` seconds.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    environment = {"PATH": path, "LANG": "C.UTF-8", "HOME": "/", **(env or {})}
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    try:
        done = subprocess.run(
            command, env={**environment, **proxies}, capture_output=True, timeout=deadline_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{what} took more than {deadline_s:g} s",
            command[0],
            hint="try again when the host and its disk are less busy; for packages,"
            " check that the Debian mirror responds",
        ) from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[-800:]
        hint = "check the free disk space; for packages, check that the Debian mirror responds"
        raise MachineError(f"{what} failed", f"{command[0]}: {message}", hint=hint)
    return done.stdout


class Apt:
    """apt, with package lists and downloads in a folder of its own.

    `mirrors`: "URL SUITE" of each Debian archive, in order of preference. The constructor raises `MachineError` if apt
    or the keys of the archive are missing.
    """

    def __init__(self, folder: Path, mirrors: Sequence[str] = MIRRORS) -> None:
        require(_TOOLS)
        if not Path(KEYRING).exists():
            hint = "install: debian-archive-keyring"
            raise MachineError("the keys of the Debian archive are missing", KEYRING, hint=hint)
        self._folder, self.archives = folder, folder / "archives"
        for name in ("lists", "archives", "nothing"):
            (folder / name / "partial").mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        sources = folder / "sources.list"
        sources.write_text("".join(f"deb [signed-by={KEYRING}] {mirror} main\n" for mirror in mirrors))
        options = {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::parts": "/dev/null",
            "Dir::State": folder,
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",  # an empty system
            "Dir::Cache": folder,
            "Dir::Cache::archives": self.archives,
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "",
            "Acquire::Check-Valid-Until": "false",  # allow snapshots of the archive
            "Acquire::ForceHash": "SHA256",
            "Acquire::Retries": "3",
        }
        self._command = ["apt-get", "-q", "-y", *(f"-o{key}={value}" for key, value in options.items())]

    def update(self) -> None:
        """Download the package lists. Raises `MachineError`."""
        run([*self._command, "update"], "updating the package lists", deadline_s=_DEADLINE_S)

    def closure(self, names: Sequence[str]) -> dict[str, str]:
        """Return the files of packages and all their dependencies: file name to SHA-256. Raises `MachineError`."""
        nothing = f"-oDir::Cache::archives={self._folder}/nothing"  # else apt does not list downloaded packages
        command = [*self._command, nothing, "--print-uris", "install", *names]
        lines = run(command, "resolving packages", deadline_s=60.0).decode().splitlines()
        found = [line.split() for line in lines if line.startswith("'")]
        return {fields[1]: fields[3].removeprefix("SHA256:") for fields in found}

    def fetch(self, names: Sequence[str], files: dict[str, str], log: Log) -> list[Package]:
        """Download packages and check their signed hashes. Returns them sorted by file name.

        `names`: the packages. `files`: the result of `closure` for them. `log` is called with lines about the progress.
        Raises `MachineError`.
        """
        missing = [name for name in files if not (self.archives / name).exists()]
        if missing:
            log(f"downloading {len(missing)} of {len(files)} packages")
            command = [*self._command, "--download-only", "install", *names]
            run(command, "downloading packages", deadline_s=_DEADLINE_S)
        return [_verified(self.archives / file, sha256) for file, sha256 in sorted(files.items())]


def _verified(path: Path, sha256: str) -> Package:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise MachineError(
            f"{path.name} is damaged",
            f"its SHA-256 is {found}, expected {sha256}",
            hint="try again: it is then downloaded again",
        )
    name, version, _ = path.name.split("_", 2)
    return Package(name, version.replace("%3a", ":"), sha256, path)
