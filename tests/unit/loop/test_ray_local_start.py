"""Starting Ray's local node on a host that is too busy for Ray's own limit."""

from __future__ import annotations

from typing import Any

import pytest

from etude.errors import ConfigError

ray = pytest.importorskip("ray")


def test_a_local_node_gets_three_tries_and_then_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.loop import ray_cluster

    late, tries = 3, 0

    def init(*args: Any, **settings: Any) -> None:
        nonlocal tries
        tries += 1
        if tries <= late:
            raise Exception("The current node timed out during startup.")  # as Ray does after 30 s

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="did not start in three tries"):
        ray_cluster.connect("ray")
    assert tries == 3
    late, tries = 2, 0
    ray_cluster.connect("ray")
    assert tries == 3
