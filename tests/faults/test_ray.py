"""A run on a Ray cluster of processes that loses actors, nodes and its driver.

What must hold is what holds on one machine: it ends, its audit is sound, no process is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_nodes import Node, Nodes, ray_nodes
from tests.running import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TWO = ("fleet.num_workers=2", "fleet.num_graders=2")
BLIND = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""A node that has its own, empty folder where others see the runs."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as made:
        yield made


@pytest.fixture
def whole(nodes: Nodes) -> Iterator[tuple[Node, Node]]:
    """Two nodes, each of which could carry a run alone."""
    both = tuple(nodes.add(name, learner=1, engine=1, worker=1, grader=1) for name in ("a", "b"))
    yield both  # type: ignore[misc]
    for node in both:
        node.end()


@pytest.fixture
def running(game: Any, tmp_path: Path, nodes: Nodes, cli_in: Callable[[Path], Any]) -> Iterator[Running]:
    cli = cli_in(tmp_path)
    run = Running(type(cli)(cli.cwd, {**cli.env, **nodes.env}), game.config)
    yield run
    run.stop()


def hosting(running: Running, child: str, nodes: tuple[Node, ...]) -> Node:
    """The node on which a child runs."""
    pid = running.pid(child)
    assert pid is not None
    above = {parent.pid for parent in psutil.Process(pid).parents()}
    [found] = [node for node in nodes if (raylet := node.raylet()) is not None and raylet.pid in above]
    return found


def refused(running: Running) -> list[dict[str, Any]]:
    """Events of who came to a node that cannot take part."""
    return [e for e in running.events("process") if e["state"] == "waiting" and "does not see" in e["reason"]]


def test_a_run_goes_on_when_the_node_of_its_learner_is_lost_and_grows_again_when_one_joins(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=40", *TWO, on=nodes.address).at_step(2)
    hosting(running, "learner", whole).lose()
    running.until(lambda: any(e["state"] == "waiting" for e in running.events("process")), "somebody to find no room")
    lost = {e["name"] for e in running.events("process") if e["state"] == "waiting"}
    running.at_step(running.step + 4)
    joined = nodes.add("c", engine=1, worker=1, grader=1)
    waiting = {name for name in lost if name != "learner"}
    assert waiting
    running.until(lambda: all(running.pid(name) for name in waiting), "the node that joined to take its share")
    assert running.end() == 0, running.said
    running.assert_sound()
    assert any(e["state"] == "lost" for e in running.events("lineage"))
    joined.end()


def test_a_learner_whose_ranks_are_on_two_nodes_loses_one_and_goes_on_when_another_joins(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=8", "learner.ranks=2", "learner.expert_parallel=2", on=nodes.address).at_step(2)
    of_rank = hosting(running, "learner-host-1", whole)
    assert hosting(running, "learner", whole) is not of_rank
    of_rank.lose()
    running.until(lambda: any(e["state"] == "lost" for e in running.events("lineage")), "the learner to be missed")
    joined = nodes.add("c", learner=1)
    assert running.end() == 0, running.said
    running.assert_sound()
    said = (running.path / "logs" / "learner.log").read_text()
    assert "rank 1 of the learner, on " in said
    assert nodes.address.partition(":")[0] in said, "the host is named by the address that others reach"
    redone = running.cli("replay", running.path, "8", "--json")
    assert redone.returncode == 0, redone.stdout + redone.stderr
    joined.end()


def test_a_run_whose_actors_are_killed_ends_and_its_audit_is_sound(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=20", on=nodes.address).at_step(1)
    children = ("learner", "engine-0", "worker-0", "grader-0")
    for child in children:
        running.until(lambda name=child: running.pid(name), f"{child} to be up")
        pid = running.pid(child)
        assert pid is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    assert running.end() == 0, running.said
    running.assert_sound()
    assert {e["name"] for e in running.events("process") if e["state"] == "restart"} == set(children)


def test_a_run_from_outside_the_cluster_ends_and_leaves_nothing(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=2", *TWO, on=nodes.client)
    assert running.end() == 0, running.said
    running.assert_sound()


def test_a_killed_driver_leaves_nothing_on_any_node_and_its_run_goes_on(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=8", *TWO, on=nodes.address).at_step(1)
    assert running.process is not None
    running.process.kill()
    running.end()
    running.assert_nothing_left(deadline_s=30.0)
    assert running.resume().end() == 0, running.said
    running.assert_sound()


def test_a_node_that_does_not_see_the_runs_is_named_before_a_run_is_made(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    blind = nodes.add("blind", *BLIND, f'mount -t tmpfs none {running.cli.cwd} && exec "$0" "$@"', engine=1)
    running.begin("rl.steps=2", on=nodes.address)
    assert running.end() == 2, running.said
    blind.end()
    assert "error: 1 of 3 nodes cannot take part: " in running.said
    assert "does not see" in running.said
    assert "hint: mount one file system on every node" in running.said
    assert not running.path.exists()


def test_a_node_that_joins_and_does_not_see_the_runs_takes_no_part(
    running: Running, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    running.begin("rl.steps=20", "fleet.engines=['reference', 'reference', 'reference']", on=nodes.address).at_step(1)
    blind = nodes.add("blind", *BLIND, f'mount -t tmpfs none {running.cli.cwd} && exec "$0" "$@"', engine=1)
    running.until(lambda: refused(running), "it to be found unfit")
    assert running.end() == 0, running.said
    blind.end()
    running.assert_sound()
    assert {e["name"] for e in refused(running)} == {"engine-2"}


def test_a_cluster_that_offers_nothing_or_does_not_answer_is_told(running: Running, nodes: Nodes) -> None:
    running.begin("rl.steps=2", on=nodes.address)
    assert running.end() == 2
    assert "error: no node of the cluster offers learner or engine or worker or grader: none of " in running.said
    running.begin("rl.steps=2", on="127.0.0.1:1")
    assert running.end() == 2
    assert "error: no Ray cluster answers at 127.0.0.1:1: " in running.said
    assert not running.path.exists()


MINE = """
from etude.harness.commands import Signature
from etude.models.families.qwen3_moe import Qwen3Moe
from etude.records.reward import Score


class Loop:
    async def run(self, episode):
        while episode.ending is None:
            await episode.act(await episode.ask())


class Lines:
    signature = Signature("lines", "Say how many files there are.")

    async def run(self, bench):
        return str(len(bench.files or ()))


class Turns:
    version = "1"

    async def score(self, rollout, graded):
        return Score(value=-float(rollout.num_turns), evidence="by " + __file__)


class Family(Qwen3Moe):
    model_type, hf_class = "mine_moe", "MineForCausalLM"


class Spread:
    name, version = "spread", "1"

    def advantages(self, rewards):
        mean = sum(one.value for one in rewards) / max(1, len(rewards))
        return [one.value - mean for one in rewards]
"""
PARTS = (
    "harness.program=mine:Loop",
    'harness.tools=["edit", "submit", "write", {kind = "mine:Lines"}]',
    'rewards.terms=[{name = "turns", weight = 0.1, kind = "mine:Turns"}]',
    "experience.credit=mine:Spread",
)


def test_a_users_module_where_the_run_is_started_is_used_on_all_nodes(
    running: Running, game: Any, nodes: Nodes, whole: tuple[Node, Node]
) -> None:
    (running.cli.cwd / "mine.py").write_text(MINE)
    start = running.cli.cwd / "start"
    shutil.copytree(game.start, start)
    config = json.loads((start / "config.json").read_text())
    config |= {"model_type": "mine_moe", "architectures": ["MineForCausalLM"]}
    (start / "config.json").write_text(json.dumps(config))
    (start / "SHA256SUMS").unlink()
    running.cli.env["ETUDE_MODEL_FAMILIES"] = "mine:Family"
    running.begin("rl.steps=2", f"start={start}", *PARTS, *TWO, on=nodes.address)
    assert running.end() == 0, running.said
    running.assert_sound()
    shown = running.cli("rollouts", "show", running.path, "g000000.0").stdout
    assert "turns -" in shown
    assert "by " in shown


def test_a_users_module_that_only_the_conductor_finds_is_an_error_before_a_run_is_made(
    running: Running, nodes: Nodes, whole: tuple[Node, Node], tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = tmp_path_factory.mktemp("apart")
    (apart / "mine.py").write_text(MINE)
    running.cli.env["PYTHONPATH"] = os.pathsep.join([str(apart), running.cli.env.get("PYTHONPATH", "")])
    running.begin("rl.steps=2", *PARTS, on=nodes.address)
    assert running.end() == 2, running.said
    assert "error: 2 of 2 nodes cannot take part: " in running.said
    assert "has no module 'mine'" in running.said
    assert "hint: install its package on every node" in running.said
    assert not running.path.exists()
