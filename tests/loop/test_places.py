"""A whole run whose ledger is on a PostgreSQL server and whose weights and traces are in a bucket."""

from __future__ import annotations

import json

import pytest

from etude.run import RunFolder


@pytest.fixture(scope="module")
def elsewhere(game, cli_in, tmp_path_factory, postgres, s3):
    """A run that has ended, and the command line beside it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    cli = cli_in(folder)
    places = [f"experience.ledger={postgres.url}", "stores.weights=s3://etude/runs", "stores.traces=s3://etude/runs"]
    done = cli("run", game.config, "--name", "a", *(word for place in places for word in ("--set", place)))
    assert done.returncode == 0, done.stderr
    return cli, RunFolder.open(folder / "runs" / "a")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_find_a_ledger_weights_and_traces_outside_of_the_run_folder(elsewhere):
    cli, run = elsewhere
    assert not [name for name in ("ledger.sqlite", "weights", "traces") if (run / name).exists()]
    assert "a-password" not in (run / "config.toml").read_text()
    audited = cli("ledger", "audit")
    assert "0 lost, 0 trained twice, 0 slots leaked; 48 of 48 rollouts consumed by 4 steps" in audited.stdout
    assert "0 of 0 rollouts consumed by 0 steps after step 4" in cli("ledger", "audit", "--new").stdout
    states = json.loads((run / "summary.json").read_text())["rollouts"]
    assert sum(states.values()) == 48
    assert f"{states['trained']} trained" in cli("status").stdout
    shown = cli("rollouts", "show", "g000000.0")
    assert "reward" in shown.stdout, shown.stderr
    for command in (("weights", "log"), ("weights", "verify"), ("report",), ("rollouts", "list")):
        done = cli(*command)
        assert done.returncode == 0, done.stderr
    replayed = cli("replay", "a", "3")
    assert replayed.returncode == 0, replayed.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_goes_on_from_the_server_and_the_bucket(game, cli_in, tmp_path, postgres, s3):
    cli = cli_in(tmp_path)
    places = [f"experience.ledger={postgres.url}", "stores.weights=s3://etude/runs", "stores.traces=s3://etude/runs"]
    process = cli.start("run", game.config, "--name", "b", *(word for place in places for word in ("--set", place)))
    events = tmp_path / "runs" / "b" / "events" / "conductor.jsonl"
    while process.poll() is None and not (events.exists() and '"rl.step", "step": 2' in events.read_text()):
        pass
    process.kill()
    process.communicate()
    done = cli("run", "--resume", timeout_s=1500)
    assert done.returncode == 0, done.stderr
    assert "0 lost, 0 trained twice, 0 slots leaked" in cli("ledger", "audit").stdout
