"""Build a Debian root filesystem from packages, with debootstrap or mmdebstrap. Needs root and a mirror.

By default it uses the mirror of this host's apt. Files that differ between runs with the same packages are removed:
caches, logs, lists, the machine id, random seeds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etude.environments.images.directory import copy_folder, open_folder
from etude.environments.images.limits import BadSource, raise_if_disk_full
from etude.environments.images.listing import Owner
from etude.environments.images.records import ImageRecord
from etude.environments.images.store import ImageStore
from etude.environments.images.tree import Tree
from etude.errors import InputError, MachineError
from etude.records.image import Image

_WORD = re.compile("[a-z0-9][a-z0-9.+-]{0,99}(=[A-Za-z0-9.+~:-]+)?")
_EMPTIED_FOLDERS = (
    "var/cache/apt", "var/lib/apt/lists", "var/log", "tmp", "run", "var/tmp", "dev", "proc", "sys",
    "var/cache/debconf",
)  # fmt: skip
_REMOVED_PATHS = ("etc/hostname", "etc/resolv.conf", "var/lib/systemd/random-seed", "var/cache/ldconfig/aux-cache",
            "var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "etc/passwd-", "etc/group-", "etc/shadow-",
            "etc/gshadow-", "etc/subuid-", "etc/subgid-", "var/lib/dbus/machine-id", "debootstrap")  # fmt: skip
_OPEN = {"tmp": 0o1777, "var/tmp": 0o1777}
_TAIL_BYTES = 1500


class AptSource(NamedTuple):
    """A line of apt's configuration: mirror URL, suite, and the keyring that signs it ("" for apt's default)."""

    mirror: str
    suite: str
    keyring: str = ""


def apt_sources(folder: str | os.PathLike[str] = "/etc/apt") -> list[AptSource]:
    """Return the package sources with a component `main` from apt's configuration in `folder`.

    Reads files in the one-line format and in deb822 format."""
    found: list[AptSource] = []
    at = Path(folder)
    for path in [at / "sources.list", *sorted((at / "sources.list.d").glob("*.list"))]:
        for line in _text(path).splitlines():
            fields = re.sub(r"\[([^]]*)\]", "", line.partition("#")[0]).split()
            signed = re.search(r"\[[^]]*signed-by=([^] ]+)", line)
            if len(fields) >= 4 and fields[0] == "deb" and "main" in fields[3:]:
                found.append(AptSource(fields[1], fields[2], signed[1] if signed else ""))
    for path in sorted((at / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n", "", _text(path))):
            entries = {k.lower(): v.split() for k, v in re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.*)$", stanza)}
            if "deb" in entries.get("types", ()) and "main" in entries.get("components", ()):
                keyring = next((k for k in entries.get("signed-by", ()) if k.startswith("/")), "")
                found += [AptSource(u, s, keyring) for u in entries.get("uris", ()) for s in entries.get("suites", ())]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def build_from_debian(
    store: ImageStore, suite: str = "", packages: Sequence[str] = (), *, mirror: str = "", deadline_s: float = 1800.0
) -> ImageRecord:
    """Build an image of a minimal Debian with additional packages.

    An empty `suite` or `mirror` stands for that of this host's apt. A package can have a version, as "name=1.2". Raises
    `MachineError` if a tool, root or a mirror is missing, `InputError` for an invalid name of a suite or package,
    `BadSource` if a package cannot be installed."""
    source = _source(suite, mirror)
    for word in (source.suite, *packages):
        if not _WORD.fullmatch(word):
            raise InputError(f"{word[:80]!r} is not a valid suite or package", hint="use names that apt accepts")
    tool = shutil.which("mmdebstrap") or shutil.which("debootstrap")
    if tool is None:
        hint = "apt install debootstrap, or build from a Dockerfile or an OCI image"
        raise MachineError("Debian cannot be built on this host", "mmdebstrap and debootstrap are missing", hint=hint)
    if os.geteuid() != 0:
        hint = "run it as root once, or build from an OCI image"
        raise MachineError("Debian cannot be built on this host", f"{Path(tool).name} needs root", hint=hint)
    with store.scratch() as folder, store.new_image() as building:
        _run(_command(tool, source, packages, folder / "root"), deadline_s)
        with open_folder(folder / "root") as root:
            copy_folder(root, "", building.tree, "", skip=_is_device_folder, owner=_as_found)
        tidy(building.tree)
        names = ", ".join(packages) or "no more packages"
        return building.commit(
            ImageRecord(
                image=Image(digest="", workdir="/root", env={"LANG": "C.UTF-8"}),
                source="debian",
                made=(f"{source.suite} with {names}",),
            )
        )


def _source(suite: str, mirror: str) -> AptSource:
    known = [s for s in apt_sources() if not re.search("-(security|updates|backports|proposed)", s.suite)]
    found = next((s for s in known if suite in ("", s.suite) and s.keyring.find("debian") >= 0), None)
    found = found or next((s for s in known if not suite or s.suite == suite), None)
    if mirror and suite:
        return AptSource(mirror, suite, found.keyring if found else "")
    if found is None:
        names = ", ".join(sorted({s.suite for s in known})) or "nothing"
        hint = "give suite and mirror, or configure the suite in /etc/apt"
        raise MachineError(f"no mirror for {suite or 'any suite'}", f"apt on this host has {names}", hint=hint)
    return found._replace(mirror=mirror or found.mirror)


def _command(tool: str, source: AptSource, packages: Sequence[str], root: Path) -> list[str]:
    more = [f"--include={','.join(packages)}"] if packages else []
    keyring = [f"--keyring={source.keyring}"] if source.keyring else []
    if Path(tool).name == "mmdebstrap":
        return [tool, "--variant=minbase", "--mode=root", *keyring, *more, source.suite, str(root), source.mirror]
    return [tool, "--variant=minbase", *keyring, *more,
            source.suite, str(root), source.mirror]  # fmt: skip


def _run(command: list[str], deadline_s: float) -> None:
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "SOURCE_DATE_EPOCH": "1000000000",
        **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
    }
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        facts = f"{Path(command[0]).name} took more than {deadline_s:g} s"
        raise MachineError("Debian could not be built", facts, hint="the mirror may be slow: use another one") from None
    if done.returncode:
        facts = done.stdout[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise_if_disk_full(facts)
        hint = "see its output: a package may not exist, or the mirror may not respond"
        raise BadSource(f"{Path(command[0]).name} ended with exit code {done.returncode}", facts, hint=hint)


def _is_device_folder(path: str) -> bool:
    return path.startswith(("dev/", "proc/", "sys/", "run/"))


def _as_found(found: os.stat_result) -> Owner:
    return Owner(found.st_mode & 0o7777, found.st_uid, found.st_gid)


def tidy(tree: Tree) -> None:
    """Remove caches, and files that differ between two installations of the same packages, from a Debian tree."""
    for path in _REMOVED_PATHS:
        tree.remove(path)
    for path in _EMPTIED_FOLDERS:
        if tree.is_folder(path):
            tree.clear(path)
    for path, mode in _OPEN.items():
        tree.folder(path, Owner(mode))
    tree.folder("var/cache/apt/archives/partial")
    tree.folder("var/lib/apt/lists/partial")
    tree.file("etc/machine-id", Owner(0o444), (b"uninitialized\n",))
