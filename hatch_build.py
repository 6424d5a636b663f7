"""Builds the native kernels beside the Python that calls them, where a Rust toolchain is; without one the package is
pure Python, slower, with the same bytes. Wheels carry the library, so that their users need no Rust."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RUST = (1, 89)
"""From this version on AVX-512 is stable."""


class NativeBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root, "native")
        name = {"darwin": "libetude_native.dylib", "win32": "etude_native.dll"}.get(sys.platform, "libetude_native.so")
        beside = Path(self.root, "src", "etude", "weights", "delta", name)
        trouble = _missing()
        if trouble:
            beside.unlink(missing_ok=True)
            self.app.display_warning(f"no native kernels: {trouble}; numpy serves, with the same bytes, but slowly")
            return
        subprocess.run(["cargo", "build", "--release", "--locked", "--offline"], cwd=native, check=True)
        fresh = beside.with_suffix(".new")
        shutil.copyfile(native / "target" / "release" / name, fresh)
        fresh.replace(beside)  # a process that has the old one loaded keeps it
        if version == "editable":
            return
        build_data["artifacts"].append(f"src/etude/weights/delta/{name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _missing() -> str:
    """What the toolchain lacks, in words; empty where nothing."""
    if shutil.which("cargo") is None:
        return "there is no cargo"
    said = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False).stdout.split()
    found = tuple(int(part) for part in said[1].split(".")[:2]) if len(said) > 1 else (0, 0)
    return "" if found >= RUST else f"rustc {RUST[0]}.{RUST[1]} or later is wanted, not {'.'.join(map(str, found))}"
