"""Commands that run code which is not etude's own refuse a host where nothing bounds a machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.here import needs
from tests.unit.tasks.repositories import shop

from etude.errors import Exit

DOCKERFILE = "FROM scratch\nCOPY a /a\nRUN /a\n"


def without_groups(*words: str) -> subprocess.CompletedProcess[str]:
    """A command on a host that has no control groups."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
    command = ["unshare", *as_root, "--mount", "sh", "-c", hide, "sh", sys.executable, "-m", "etude.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def _machines() -> None:
    needs("namespace")


@pytest.mark.parametrize(
    "words", [("tasks", "check", "repair", "--num", "1"), ("machines", "run", "--", "true")], ids=["check", "run"]
)
def test_a_command_is_refused_unless_its_user_accepts_it(words: tuple[str, ...]) -> None:
    refused = without_groups(*words)
    assert refused.returncode == Exit.FAILED
    assert "the memory of a machine cannot be bounded here" in refused.stderr
    assert "--unbounded-memory" in refused.stderr
    accepted = without_groups(*words[:2], "--unbounded-memory", *words[2:])
    assert accepted.returncode == Exit.DONE, accepted.stderr


def test_mining_serving_and_building_are_refused_too(tmp_path: Path) -> None:
    shop(tmp_path / "shop")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "a").write_text("")
    for words in (
        ("tasks", "mine", str(tmp_path / "shop"), "--out", str(tmp_path / "mined")),
        ("machines", "serve", "--port", "0"),
        ("machines", "image", "build", str(tmp_path), "--from", "dockerfile", "--store", str(tmp_path / "images")),
    ):
        refused = without_groups(*words)
        assert refused.returncode == Exit.FAILED, words
        assert "the memory of a machine cannot be bounded here" in refused.stderr, words


def test_what_tries_the_host_itself_is_not_refused() -> None:
    done = without_groups("machines", "probe")
    assert "namespace" in done.stdout
    assert "the memory of a machine cannot be bounded" not in done.stdout + done.stderr


def test_an_evaluation_is_refused_before_it_starts_anything(game: Any) -> None:
    done = without_groups("eval", "own", "--checkpoint", str(game.start), "--config", str(game.config), "--tasks", "2")
    assert done.returncode == Exit.FAILED
    assert "the memory of a machine cannot be bounded here" in done.stderr
    assert "starting engines" not in done.stderr
