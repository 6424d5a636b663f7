"""Engines from elsewhere in a run: what its config may say, and how much may run."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import build, to_toml
from etude.errors import ConfigError, EtudeError
from etude.inference.config import EngineKind
from etude.inference.registry_messages import ListedEngine, Roster, State
from etude.loop import engine_registry
from etude.loop.config import RunConfig
from etude.loop.evaluation import without_remote_engines
from etude.loop.run_processes import RunProcesses
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events

SIZES = {"engine": {"max_sequences": 40}}
ELSEWHERE = {**SIZES, "fleet": {"engines": [], "listen": "127.0.0.1:0"}}


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"engines": []}, "it may have none if remote engines can join"),
        ({"listen": "8790"}, "is not HOST:PORT"),
        ({"listen": "host:99999"}, "is not HOST:PORT"),
        ({"listen": "http://0.0.0.0:8790"}, "is not HOST:PORT, such as '0.0.0.0:8790'"),
        ({"listen": 8790}, 'write e.g. fleet.listen = "0.0.0.0:8790"'),
    ],
)
def test_a_fleet_that_could_have_no_engine_or_no_registry_is_refused(fleet: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, {"fleet": fleet})


def test_a_registry_that_others_reach_wants_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_TOKEN", raising=False)
    engine_registry.check_listen(build(RunConfig, ELSEWHERE))
    wide = build(RunConfig, {"fleet": {"listen": "0.0.0.0:0"}})
    with pytest.raises(ConfigError, match="needs a token"):
        engine_registry.check_listen(wide)
    monkeypatch.setenv("ETUDE_TOKEN", "t")
    engine_registry.check_listen(wide)


def test_a_port_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = build(RunConfig, {"fleet": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}})
        with pytest.raises(ConfigError, match=r"fleet\.listen = .* cannot listen on") as error:
            engine_registry.check_listen(config)
    assert "a free port" in error.value.hint


def test_how_much_runs_follows_the_engines_that_serve() -> None:
    async def story() -> None:
        processes = RunProcesses(None, build(RunConfig, ELSEWHERE), None, None)  # type: ignore[arg-type]
        assert processes.max_running.value == 0
        serving, other = (
            ListedEngine(url="http://e", state=s, max_sequences=40) for s in (State.SERVING, State.STANDBY)
        )
        for roster, most in (({"a": serving, "b": other}, 30), ({"a": serving, "b": serving}, 60), ({}, 0)):
            await processes._on_roster(roster)
            assert processes.max_running.value == most
        both = RunProcesses(None, build(RunConfig, SIZES), None, None)  # type: ignore[arg-type]
        assert both.max_running.value == 60

    asyncio.run(story())


def test_a_run_without_any_engine_ends_and_says_where_they_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_registry, "NONE_S", 0.01)
    config = build(RunConfig, ELSEWHERE)
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    (run / "checkpoints" / "mid").mkdir(parents=True)
    (run / "checkpoints" / "mid" / "config.json").write_text("{}")
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")

    async def beat(_: Roster) -> dict[str, int]:
        return {}

    async def story() -> EtudeError:
        failed: asyncio.Future[EtudeError] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(100), engine_registry.open_registry(run, config, telemetry, beat, failed=failed):
            return await failed

    error = asyncio.run(story())
    assert str(error).startswith("the run has no engine: none has joined")
    assert "--register http://127.0.0.1:" in error.hint
    [event] = [e for e in read_events(run / "events") if e["kind"] == "fleet.listen"]
    assert event["url"].startswith("http://127.0.0.1:")


def test_a_run_tells_where_it_waits_for_engines_and_that_one_has_come(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "conductor.jsonl", process="conductor")
    registrar = SimpleNamespace(roster={})

    async def story() -> None:
        waiting = asyncio.create_task(engine_registry.wait_for_first_engine(registrar, telemetry, "home:8790"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for state in (State.CATCHING_UP, State.SERVING):
            registrar.roster = {"west": ListedEngine(url="http://e", state=state)}
            await asyncio.sleep(2 * engine_registry.POLL_S)
        await asyncio.wait_for(waiting, 20)

    asyncio.run(story())
    telemetry.close()
    events = [(e["name"], e["state"], e.get("reason")) for e in read_events(tmp_path)]
    assert events == [
        ("engines", "waiting", "they join at home:8790, none has joined"),
        ("engines", "waiting", "they join at home:8790, west is catching-up"),
        ("engines", "ready", None),
    ]


def test_a_checkpoint_of_a_run_is_evaluated_on_an_engine_of_its_own() -> None:
    fleet = without_remote_engines(build(RunConfig, ELSEWHERE)).fleet
    assert (fleet.engines, fleet.listen) == ((EngineKind.REFERENCE,), "")
