"""Regions behind limited links, one slow, one killed, one cut off, one late: a small `benchmarks.weights.regions`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.weights import four_regions, regions
from benchmarks.weights.regions_network import Link, Network, module_env

CAN = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CAN, reason="needs root, ip, tc, nsenter and unshare"),
]


def test_four_regions_converge_and_none_serves_an_unproven_version(tmp_path: Path) -> None:
    numbers = regions.measure(0.004, 1.0, tmp_path, late_from_base=False)
    assert numbers["converged"]
    assert numbers["unproven_versions_served"] == 0
    assert numbers["regions"]["dies"]["starts"] == 2
    assert numbers["regions"]["late"]["versions"] < numbers["regions"]["slow"]["versions"]
    assert numbers["regions"]["apart"]["versions"] == regions.NUM_VERSIONS - 1


def test_a_run_over_four_regions_loses_nothing_to_their_faults(game: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    told = four_regions.measure(game.config, ["evals.every=1000", "experience.groups_per_step=8"], 40, faults=True)
    assert (told["lost"], told["trained_twice"], told["steps"]) == (0, 0, 40), told["audit"]
    assert told["invalid"] == 0
    states = {name: one["states"] for name, one in told["regions"].items()}
    assert states["dies"] == ["catching-up", "serving", "lost"]
    assert states["apart"][:3] == ["catching-up", "serving", "lost"]
    assert states["late"] == ["catching-up", "serving"]
    assert all(one["rollouts"] for name, one in told["regions"].items() if name != "slow")  # it may be asked nothing


def test_nothing_is_left_of_a_network_whose_maker_was_killed(tmp_path: Path) -> None:
    make = (
        "import os, signal\n"
        "from benchmarks.weights.regions_network import Link, Network, module_env\n"
        "network = Network({'a': Link(1, 0.01)}, 9, module_env())\n"
        "print(network.home.pid, network.regions['a'].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    made = subprocess.run([sys.executable, "-c", make], env=module_env(), capture_output=True, text=True, timeout=300)
    pids = [int(pid) for pid in made.stdout.split()]
    assert len(pids) == 2, made.stderr
    for pid in pids:
        assert not Path(f"/proc/{pid}/ns/net").exists() or _ended(pid)


def test_a_network_that_is_closed_leaves_no_process(tmp_path: Path) -> None:
    network = Network({"a": Link(1, 0.01)}, 9, module_env())
    pids = [network.home.pid, network.regions["a"].pid]
    network.partition("a", whole=False)
    network.partition("a", whole=True)
    assert network.received_bytes("a") >= 0
    network.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _ended(pid: int) -> bool:
    """Whether it is a zombie that nobody has waited for yet."""
    return ") Z" in Path(f"/proc/{pid}/stat").read_text()
