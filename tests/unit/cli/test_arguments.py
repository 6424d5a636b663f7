"""The command line's own refusals have three parts, too."""

from __future__ import annotations

import pytest

from etude.cli import main


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
    assert "\n  hint: etude" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "nosuch"], "nothing at nosuch: nor at runs/nosuch"),
        (["export", "nosuch", "out"], "nothing at nosuch"),
        (["eval", "nosuch"], "nothing at nosuch"),
        (["run"], "no CONFIG was given"),
        (["status"], "no run in runs/"),
        (["status", "nosuch"], "nosuch is not a run"),
        (["run", "nosuch.toml"], "no config at nosuch.toml"),
        (["tasks", "check", "repiar"], "no task source 'repiar'"),
    ],
)
def test_what_is_not_there_is_named_with_a_hint(argv, says, capsys, tmp_path, monkeypatch):
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
    assert f"--name {name!r} is no name of a run" in said
    assert "hint: give a plain name" in said
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]
