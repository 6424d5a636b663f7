"""The command line's own refusals have three parts, too."""

from __future__ import annotations

import argparse
import re
import sys

import pytest

from etude.cli import arguments, main
from etude.config import build
from etude.errors import ConfigError, NoSource
from etude.loop.config import RunConfig


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["rnu"],
        ["run", "x.toml", "--stpes", "3"],
        ["weights", "diff", "1"],
        ["eval", "x", "--tasks", "0"],
        ["eval", "x", "--tasks", "-4"],
        ["eval", "x", "--tries", "0"],
        ["tasks", "check", "repair", "--num", "-1"],
        ["serve", "--port", "x"],
        ["serve", "--port", "99999"],
        ["serve", "--port", "-1"],
        ["machines", "check", "--out", "/nowhere/findings.json"],
        ["machines", "parity", "plain", "plain", "--out", "/"],
        ["tasks", "check", "repair", "--out", "/nowhere/report.json"],
    ],
)
def test_a_wrong_argument_is_refused_with_a_hint(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert re.search(r"\n  hint: .*etude.* --help", said)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "nosuch"], "nothing at nosuch: nor at runs/nosuch"),
        (["export", "nosuch", "out"], "nothing at nosuch"),
        (["eval", "nosuch"], "no suite 'nosuch'"),
        (["eval", "own", "--checkpoint", "nosuch"], "nothing at nosuch"),
        (["eval", "own", "--url", "http://127.0.0.1:1"], "--model is missing"),
        (["eval", "own", "--url", "http://127.0.0.1:1", "--model", "m", "--beside"], "--beside needs --checkpoint"),
        (["eval", "humaneval", "--baseline", "oracle"], "--source names other tasks for the suite humaneval"),
        (["leaderboard", "nosuch"], "nosuch has no result"),
        (["run"], "no CONFIG was given"),
        (["status"], "no run in runs/"),
        (["status", "nosuch"], "nosuch is not a run"),
        (["run", "nosuch.toml"], "no config at nosuch.toml"),
        (["tasks", "check", "repiar"], "no task source 'repiar'"),
    ],
)
def test_missing_runs_and_checkpoints_are_named_with_a_hint(argv, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) != 0
    said = capsys.readouterr().err
    assert says in said
    assert "\n  hint: " in said


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "", ".", ".."])
def test_a_name_of_a_run_with_path_parts_is_refused(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("seed = 1\n")
    assert main(["run", "c.toml", "--name", name]) == 2
    said = capsys.readouterr().err
    assert f"--name {name!r} is not a valid name for a run" in said
    assert "hint: give a name without a path" in said
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize("text", ["local", "ray", "10.0.0.1:6379", "ray://head.cluster:10001", "[::1]:6379"])
def test_a_cluster_address_is_local_ray_or_host_and_port(text):
    assert arguments.cluster(text) == text


@pytest.mark.parametrize("text", ["", "lokal", "head", "ray://head", "http://head:1", "head:port", "a b:1"])
def test_an_invalid_cluster_address_is_refused_with_the_valid_forms(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match="is not a cluster: write local, ray, HOST:PORT or ray://HOST:PORT"
    ):
        arguments.cluster(text)


@pytest.mark.parametrize("on", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_listen_is_told_at_once(on):
    from etude.loop import ray_cluster

    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {on}: .*refused"):
        ray_cluster.connect(on)


def test_tasks_that_are_not_there_are_named_before_a_cluster_is_asked(tmp_path):
    from etude.loop import ray_cluster

    config = build(RunConfig, {"tasks": {"source": str(tmp_path / "tasks")}})
    with pytest.raises(NoSource, match=f"neither a known name nor a directory: {tmp_path}/tasks does not exist"):
        ray_cluster.check(config, tmp_path / "runs")


def test_a_cluster_without_ray_says_what_to_install(monkeypatch, capsys, tmp_path):
    import etude.loop

    monkeypatch.delattr(etude.loop, "ray_cluster", raising=False)
    monkeypatch.delitem(sys.modules, "etude.loop.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("seed = 1\n")
    assert main(["run", "c.toml", "--on", "ray"]) == 2
    said = capsys.readouterr().err
    assert "error: --on ray needs Ray: it is not installed\n  hint: pip install 'etude[ray]'" in said
