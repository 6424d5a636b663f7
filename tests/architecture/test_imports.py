"""Which folder may import which: each is imported in a fresh interpreter, and every import statement is read."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "etude"
SHARED = {
    "records",
    "seams",
    "errors",
    "telemetry",
    "config",
    "plugins",
    "http_client",
    "http_server",
    "progress",
    "scratch",
    "syntax",
    "file_checksums",
    "grammars",
    "prices",
    "sqlite_reading",
    "secrets",
}
ALONE: dict[str, set[str]] = {
    # usable alone, and the siblings that it imports all the same
    "stores": set(),
    "environments": set(),
    "capture": set(),
    "harness": {"capture"},
    "rewards": set(),
    "experience": {"rewards"},
    "weights": set(),
    "gateway": {"capture"},
    "corpus": {"capture", "harness"},
    "privacy": set(),
    "signals": {"privacy"},
}
TORCH_FREE = {
    "records",
    "trackers",
    "tasks",
    "rollouts",
    "evals",
    "inference",
    "dashboard",
    "dash",
    "training",
    "plan",
    "production",
    "releases",
    "backups",
    "harvest",
    "cli",
    *ALONE,
}
PROCESSES = [f"etude.loop.{name}" for name in ("conductor", "worker", "grader", "phases", "config", "serving")]
FOLDERS = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())


@functools.cache
def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


@pytest.mark.parametrize("folder", sorted(ALONE))
def test_a_folder_that_is_usable_alone_loads_no_sibling_and_no_torch(folder):
    loaded = loaded_after(f"import etude.{folder}")
    siblings = {m.split(".")[1] for m in loaded if m.startswith("etude.")} - SHARED - {folder} - ALONE[folder]
    assert not siblings
    assert not {"torch", "vllm", "transformers", "ray"} & loaded


def those_that_load(names: set[str], modules: Collection[str]) -> list[str]:
    """The modules whose import loads one of `names`, or a part of it.

    One process imports them all; only if that loads one are they imported one by one."""

    def loads(*some: str) -> bool:
        loaded = loaded_after(f"import {', '.join(some)}")
        return any(name == one or name.startswith(f"{one}.") for name in loaded for one in names)

    return [one for one in modules if loads(one)] if loads(*modules) else []


def test_a_module_that_loads_another_is_named():
    assert those_that_load({"json"}, ["abc", "json.decoder", "keyword"]) == ["json.decoder"]


def test_importing_a_folder_that_agents_conductors_and_readers_use_loads_no_torch():
    assert those_that_load({"torch"}, [f"etude.{folder}" for folder in sorted(TORCH_FREE & set(FOLDERS))]) == []


def test_only_learners_and_engines_load_torch_and_only_a_run_on_a_cluster_loads_ray():
    assert those_that_load({"torch", "ray"}, PROCESSES) == []


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("etude.")}


def test_only_the_command_line_imports_the_loop():
    importers = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py") if "loop" in imports(p)}
    assert importers <= {"loop", "cli"}


def test_attacks_are_imported_by_the_command_line_only():
    importers = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py") if "redteam" in imports(p)}
    assert importers <= {"redteam", "cli"}


def test_no_process_of_a_run_loads_an_attack():
    assert those_that_load({"etude.redteam"}, PROCESSES) == []


def test_no_folder_imports_the_command_line():
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


def module_name(path: Path) -> str:
    parts = ("etude", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_to_run(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of ours that a file imports, on load or within functions: not those for type checkers only."""
    found, nodes = set[str](), list[ast.AST](parsed(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
            above = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
        else:
            nodes += ast.iter_child_nodes(node)
    return found & set(modules)


def test_no_modules_import_each_other_in_a_circle():
    files = {module_name(path): path for path in ROOT.rglob("*.py")}
    graph = {name: imported_to_run(path, files) - {name} for name, path in files.items()}
    assert len(graph["etude.loop.conductor"]) > 10
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


HEAVY = {"torch", "transformers", "ray", "rich", "starlette", "uvicorn", "aiohttp", "pyarrow", "jinja2", "obstore",
         "cryptography", "asyncio", "ssl", "http.client", "multiprocessing"}  # fmt: skip


def test_importing_the_weights_loads_nothing_before_a_name_is_used():
    assert not (HEAVY | {"numpy", "msgspec", "zstandard"}) & loaded_after("import etude.weights")
    loaded = loaded_after("from etude.weights import Channel, Follower, chain, encode\nassert callable(chain)")
    assert {"numpy", "etude.weights.chain.channel"} <= loaded
    assert not HEAVY & loaded


def test_the_help_of_the_command_line_loads_no_library():
    show = "try:\n    etude.cli.main(['--help'])\nexcept SystemExit:\n    print()"
    loaded = loaded_after(f"import etude.cli\n{show}")
    assert "etude.cli.commands" in loaded
    assert not (HEAVY | {"numpy", "msgspec", "zstandard"}) & loaded
