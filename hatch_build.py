"""Builds the native kernels and the machine agent beside the Python that uses them, where a Rust toolchain is.

Without one the package is pure Python: slower kernels with the same bytes, and machines without the agent. Wheels carry
both, so that their users need no Rust."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RUST = (1, 89)
"""From this version on AVX-512 is stable."""
OLDEST_GLIBC = (2, 17)
"""Of the systems that pip knows manylinux tags for."""
GLIBC = re.compile(rb"GLIBC_([0-9]+)\.([0-9]+)")
"""A symbol's version in an object file."""


class NativeBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        names = {"darwin": "libetude_native.dylib", "win32": "etude_native.dll"}
        library, without = (
            names.get(sys.platform, "libetude_native.so"),
            "numpy serves, with the same bytes, but slowly",
        )
        made = [self._build("native", library, "src/etude/weights/delta", without)]
        if sys.platform == "linux":
            without = "machines in virtual machines and gVisor are not to be had, others are slower"
            made.append(self._build("native/agent", "etude-agent", "src/etude/environments/agent", without))
        made = [path for path in made if path]
        if version == "editable" or not made:
            return
        build_data["artifacts"] += made
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform([Path(self.root, path) for path in made])}"

    def _build(self, crate: str, name: str, folder: str, without: str) -> str:
        """Build a crate and put what it makes into `folder`; returns its path there, "" where that cannot be done."""
        beside = Path(self.root, folder, name)
        trouble = _missing()
        if not trouble and _cargo(Path(self.root, crate)) != 0:
            trouble = f"cargo could not build {crate}"
        if trouble:
            beside.unlink(missing_ok=True)
            self.app.display_warning(f"no {name}: {trouble}; {without}")
            return ""
        fresh = beside.with_name(f"{name}.new")
        shutil.copy(Path(self.root, crate, "target", "release", name), fresh)
        fresh.replace(beside)  # a process that has the old one loaded keeps it
        return f"{folder}/{name}"


def _cargo(crate: Path) -> int:
    """Build a crate; cargo's exit code. Flags of the environment's would hide those that make the agent static."""
    flags = {name: value for name, value in os.environ.items() if not name.endswith("RUSTFLAGS")}
    build = ["cargo", "build", "--release", "--locked", "--offline"]
    return subprocess.run(build, cwd=crate, env=flags, check=False).returncode


def _platform(made: list[Path]) -> str:
    """Where a wheel with these files runs: on Linux every system whose glibc has the newest symbol that they use."""
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not here.startswith("linux_"):
        return here
    wanted = {tuple(map(int, found)) for path in made for found in GLIBC.findall(path.read_bytes())}
    major, minor = max(wanted, default=OLDEST_GLIBC)
    major, minor = max((major, minor), OLDEST_GLIBC)
    return here.replace("linux_", f"manylinux_{major}_{minor}_", 1)


def _missing() -> str:
    """What the toolchain lacks, in words; empty where nothing."""
    if shutil.which("cargo") is None:
        return "there is no cargo"
    said = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False).stdout.split()
    found = tuple(int(part) for part in said[1].split(".")[:2]) if len(said) > 1 else (0, 0)
    return "" if found >= RUST else f"rustc {RUST[0]}.{RUST[1]} or later is wanted, not {'.'.join(map(str, found))}"
