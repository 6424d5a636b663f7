"""An install without extras: the base dependencies alone, and commands that work or name the missing extra."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from etude.weights.files.checkpoint import CheckpointWriter, layout
from etude.weights.tensors import Tensor

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WEIGHTS = (
    "publish c0 store",
    "publish c1 store",
    "log store",
    "diff 0 1 store",
    "fsck store",
    "follow store --apply live --once",
    "point store 0",
    "gc store",
    "diff c0 c1 --plot diff.html",
    "encode c0 c1 -o delta",
    "verify delta --base c0",
    "apply c0 delta -o made",
)
LIGHT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from etude.cli import main
sys.exit(main(sys.argv[1:]))
"""
MOST_BYTES = 150_000_000


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=\[;]", one)[0] for one in requirements}


def checkpoints(folder: Path) -> None:
    for step in range(2):
        codes = np.arange(4096, dtype=np.uint16) + np.uint16(step)
        tensors = {"w": Tensor("bf16", (4096,), codes)}
        with CheckpointWriter(folder / f"c{step}", layout(tensors)) as writer:
            writer.put("w", tensors["w"])


@pytest.fixture
def light(tmp_path: Path) -> list[str]:
    """`etude` in an interpreter that finds nothing of what the extras bring."""
    extras = names([one for group in PROJECT["optional-dependencies"].values() for one in group])
    return [sys.executable, "-c", LIGHT % (extras - {"etude"},)]


def test_every_command_for_weights_works_with_the_base_dependencies_alone(tmp_path: Path, light: list[str]) -> None:
    checkpoints(tmp_path)
    for command in WEIGHTS:
        done = subprocess.run([*light, "weights", *command.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize(
    ("command", "extra"),
    [("run config.toml", "train"), ("weights key file", "signing"), ("weights log s3://bucket/a", "buckets")],
)
def test_a_command_that_needs_more_says_which_extra_brings_it(
    tmp_path: Path, light: list[str], command: str, extra: str
) -> None:
    (tmp_path / "config.toml").write_text("seed = 1\n")
    done = subprocess.run([*light, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert f"pip install 'etude[{extra}]'" in done.stderr


def test_torch_is_bounded_to_what_is_tested_and_in_no_plain_install() -> None:
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert "torch" not in names(PROJECT["dependencies"])
    (torch,) = [one for one in PROJECT["optional-dependencies"]["train"] if one.startswith("torch")]
    major, minor = map(int, pinned.groups())
    assert torch.replace(" ", "") == f"torch>={major}.{minor},<{major}.{minor + 1}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_installs_without_rust_in_a_fresh_environment_and_stays_small(tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("no cargo here: a wheel has the native parts")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.search(r"py3-none-(manylinux_2_\d+_\w+|macosx_\w+)\.whl$", wheel.name)
    held = zipfile.ZipFile(wheel).namelist()
    assert "etude/environments/agent/etude-agent" in held
    assert any(name.startswith("etude/weights/delta/libetude_native") for name in held)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    packages = next((tmp_path / "fresh" / "lib").glob("python*/site-packages"))
    before = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    bin = tmp_path / "fresh" / "bin"
    pip = [bin / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    after = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    print(f"a light install has {(after - before) / 1e6:.0f} MB")
    assert after - before < MOST_BYTES
    checkpoints(tmp_path)
    plain = {**os.environ, "PATH": f"{bin}:/usr/bin:/bin"}
    for command in WEIGHTS:
        subprocess.run(["etude", "weights", *command.split()], cwd=tmp_path, env=plain, check=True, capture_output=True)
    native = "from etude.weights.delta.native import load; assert load() is not None"
    subprocess.run([bin / "python", "-c", native], check=True)
