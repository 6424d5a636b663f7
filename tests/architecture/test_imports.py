"""Who may know whom: checked by importing each folder in a fresh interpreter, and by reading every import."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "etude"
SHARED = {"records", "seams", "errors", "telemetry", "config", "listening", "progress", "scratch", "syntax", "sums"}
ALONE: dict[str, set[str]] = {
    # usable alone, and the siblings that it imports all the same
    "stores": set(),
    "environments": set(),
    "capture": set(),
    "harness": {"capture"},
    "experience": set(),
    "weights": set(),
    "gateway": {"capture"},
}
TORCH_FREE = {"records", "tasks", "rollouts", "evals", "inference", "dashboard", "training", "plan", "cli", *ALONE}
FOLDERS = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())


@functools.cache
def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("folder", sorted(ALONE))
def test_a_folder_that_is_usable_alone_loads_no_sibling_and_no_torch(folder):
    loaded = loaded_after(f"import etude.{folder}")
    siblings = {m.split(".")[1] for m in loaded if m.startswith("etude.")} - SHARED - {folder} - ALONE[folder]
    assert not siblings
    assert not {"torch", "vllm", "transformers", "ray"} & loaded


@pytest.mark.parametrize("folder", sorted(TORCH_FREE & set(FOLDERS)))
def test_importing_a_folder_that_agents_conductors_and_readers_use_loads_no_torch(folder):
    assert "torch" not in loaded_after(f"import etude.{folder}")


@pytest.mark.parametrize("module", ["conductor", "worker", "grading", "phases", "config", "serving"])
def test_only_learners_and_engines_load_torch_and_only_a_run_on_a_cluster_loads_ray(module):
    assert not {"torch", "ray"} & loaded_after(f"import etude.loop.{module}")


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("etude.")}


def test_nobody_imports_the_loop_but_the_command_line():
    importers = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py") if "loop" in imports(p)}
    assert importers <= {"loop", "cli"}


def test_nobody_imports_the_command_line():
    assert {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py") if "cli" in imports(p)} <= {"cli"}


def test_records_import_nothing_of_ours():
    assert {name for p in (ROOT / "records").glob("*.py") for name in imports(p)} <= {"records"}


def test_seams_know_records_only():
    assert imports(ROOT / "seams.py") <= {"records"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folders_face_has_at_most_fifteen_names_and_says_what_it_is_for(folder):
    tree = ast.parse((ROOT / folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    faces = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
    assert all(len(ast.literal_eval(face)) <= 15 for face in faces)


def test_a_seam_has_at_most_six_methods():
    tree = ast.parse((ROOT / "seams.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") == "Protocol" for b in node.bases):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert len(methods) <= 6, node.name
