"""Packages for machines without a network, downloaded once with the registries that this host is configured for.

A folder contains the packages and a list of them with their SHA-256::

    <folder>/packages.json                  all `Package` records
    <folder>/files/<sha256>                 the files, by content

pip, npm and apt do the downloads, so this host's mirrors, keys and proxies apply.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from etude.errors import InputError, MachineError, StoreError

_SPEC_PATTERNS = {
    "pip": re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)"),
    "npm": re.compile(r"((?:@[a-z0-9._-]+/)?[a-z0-9][a-z0-9._-]*)@([A-Za-z0-9.+-]+)"),
    "apt": re.compile(r"([a-z0-9][a-z0-9.+-]*)=([A-Za-z0-9.+~:-]+)"),
}
_TAIL_BYTES = 1000


class PackageSpec(msgspec.Struct, frozen=True):
    """A package with an exact version; `kind` is "pip", "npm" or "apt". Allow-lists consist of these.

    >>> parse_package_spec("pip:Foo.Bar==1.0")
    PackageSpec(kind='pip', name='foo-bar', version='1.0')
    """

    kind: str  # "pip", "npm", "apt"
    name: str
    version: str


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A downloaded package file: its name in the registry `file`, digest and size in bytes.

    `facts` is the registry's metadata as text: the version document of npm, or the stanza of apt."""

    kind: str
    name: str
    version: str
    file: str  # file name
    sha256: str
    size: int
    facts: str = ""


def parse_package_spec(text: str) -> PackageSpec:
    """Parse ``pip:name==version``, ``npm:name@version`` or ``apt:name=version``. Raises `InputError` for other text."""
    kind, _, rest = text.strip().partition(":")
    found = _SPEC_PATTERNS[kind].fullmatch(rest) if kind in _SPEC_PATTERNS else None
    if not found:
        hint = "write pip:NAME==VERSION, npm:NAME@VERSION or apt:NAME=VERSION"
        raise InputError(f"{text[:80]!r} is not a package specification", hint=hint)
    return PackageSpec(kind, normalize_name(kind, found[1]), found[2])


def normalize_name(kind: str, name: str) -> str:
    """Return a package name in the canonical form of its registry `kind` ("pip", "npm" or "apt")."""
    return re.sub("[-_.]+", "-", name).lower() if kind == "pip" else name


class Packages:
    """The downloaded packages in a folder. Mirrors read it; `fetch` and `take` add to it.

    Raises `StoreError` if the folder's list of packages is damaged."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        (self.folder / "files").mkdir(parents=True, exist_ok=True)
        self.known: list[Package] = []
        if (self.folder / "packages.json").exists():
            try:
                data = (self.folder / "packages.json").read_bytes()
                self.known = msgspec.json.decode(data, type=list[Package])
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                facts = str(error)[:200]
                raise StoreError(
                    f"{self.folder}/packages.json is damaged", facts, hint="fetch the packages again"
                ) from None

    def path(self, package: Package) -> Path:
        """Return the path of a package's file."""
        return self.folder / "files" / package.sha256

    def verify(self) -> None:
        """Check the digest of every file. Raises `StoreError` for the first file that is damaged or missing."""
        for package in self.known:
            try:
                with open(self.path(package), "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                found = "unknown: the file is missing"
            if found != package.sha256:
                facts = f"its SHA-256 is {found[:16]}, expected {package.sha256[:16]}"
                raise StoreError(f"{package.file} of the packages is damaged", facts, hint="fetch it again")

    def take(self, wheel: Path) -> Package:
        """Add a local Python wheel. Raises `InputError` if the file is not named like a wheel or cannot be read."""
        found = re.fullmatch(r"([A-Za-z0-9._]+)-([A-Za-z0-9._+!]+)(-[^-]+){3,4}\.whl", wheel.name)
        if found is None or not wheel.is_file():
            raise InputError(f"{wheel} is not a wheel", hint="give NAME-VERSION-TAGS.whl, as pip makes them")
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="fetch-") as folder:
            copy = Path(shutil.copy(wheel, folder))
            package = self._keep("pip", normalize_name("pip", found[1]), found[2], copy, "")
        self._list()
        return package

    def fetch(
        self, packages: Iterable[PackageSpec], *, dependencies: bool = False, deadline_s: float = 600.0
    ) -> list[Package]:
        """Download packages from the registries that this host is configured for; return those that are new.

        With `dependencies`, pip also downloads what they require. Raises `MachineError` with the message of pip, npm or
        apt if a download fails or takes more than `deadline_s` seconds."""
        tools = {"pip": _fetch_pip, "npm": _fetch_npm, "apt": _fetch_apt}
        new: list[Package] = []
        for spec in packages:
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="fetch-") as folder:
                for name, version, path, facts in tools[spec.kind](spec, Path(folder), dependencies, deadline_s):
                    had = len(self.known)
                    found = self._keep(spec.kind, name, version, path, facts)
                    new += [found] * (len(self.known) - had)
        self._list()
        return new

    def _keep(self, kind: str, name: str, version: str, path: Path, facts: str) -> Package:
        """Move a file into the folder."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = Package(
            kind=kind, name=name, version=version, file=path.name, sha256=digest, size=path.stat().st_size, facts=facts
        )
        os.replace(path, self.path(found))
        if found not in self.known:
            self.known.append(found)
        return found

    def _list(self) -> None:
        data = msgspec.json.format(msgspec.json.encode(self.known), indent=1)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="fetch-") as folder:
            Path(folder, "list").write_bytes(data)
            os.replace(Path(folder, "list"), self.folder / "packages.json")


Fetched = list[tuple[str, str, Path, str]]


def _fetch_pip(spec: PackageSpec, folder: Path, dependencies: bool, deadline_s: float) -> Fetched:
    options = ["--disable-pip-version-check", "--no-input", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    no_deps = [] if dependencies else ["--no-deps"]
    command = [sys.executable, "-m", "pip", "download", *options, *no_deps, "--", f"{spec.name}=={spec.version}"]
    _run(command, folder, deadline_s)
    found = []
    for path in sorted(folder.iterdir()):
        name, version, *_ = path.name.removesuffix(".tar.gz").split("-")
        found.append((normalize_name("pip", name), version, path, ""))
    return found


def _fetch_npm(package: PackageSpec, folder: Path, dependencies: bool, deadline_s: float) -> Fetched:
    spec = f"{package.name}@{package.version}"
    facts = _run(["npm", "view", "--json", spec], folder, deadline_s)
    _run(["npm", "pack", "--silent", "--ignore-scripts", spec], folder, deadline_s)
    return [(package.name, package.version, path, facts.decode()) for path in sorted(folder.glob("*.tgz"))]


def _fetch_apt(package: PackageSpec, folder: Path, dependencies: bool, deadline_s: float) -> Fetched:
    spec = f"{package.name}={package.version}"
    facts = _run(["apt-cache", "show", "--no-all-versions", spec], folder, deadline_s).decode(errors="replace")
    _run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", spec], folder, deadline_s)
    stanza = "\n".join(line for line in facts.split("\n\n")[0].splitlines())
    return [(package.name, package.version, path, stanza) for path in sorted(folder.glob("*.deb"))]


def _run(command: Sequence[str], folder: Path, deadline_s: float) -> bytes:
    tool = "pip" if command[0] == sys.executable else command[0]
    if shutil.which(command[0]) is None:
        raise MachineError(f"{tool} is needed to fetch packages", f"{tool} is not installed", hint=f"install {tool}")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        facts = f"{tool} took more than {deadline_s:g} s"
        raise MachineError(
            "a package could not be fetched", facts, hint="check that the registry is reachable from this host"
        ) from None
    if done.returncode:
        message = (done.stderr or done.stdout)[-_TAIL_BYTES:].decode(errors="replace").strip()
        hint = "check that this version exists, and that the registry is reachable from this host"
        raise MachineError(f"{tool} could not fetch {command[-1]}", message, hint=hint)
    return done.stdout


def npm_document(package: Package) -> dict[str, object]:
    """Return npm's metadata of a package version; {} if it is not a JSON object."""
    try:
        found = json.loads(package.facts)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
