from __future__ import annotations

import asyncio
import dataclasses
import json
from xml.etree import ElementTree

import pytest
from benchmarks.fleet.costs import burst, burst_s, fitted, held_out, measure, predict
from benchmarks.fleet.hosts import Measured
from benchmarks.fleet.model import Faults, Scenario, Simulated, simulate
from benchmarks.fleet.simulate import main
from tests.here import opened

from etude.environments import NamespaceRuntime

SMALL = Scenario(machines=3200, hosts=8, snapshots=20, cores=48, horizon_s=45.0)
BAD_DAY = Faults(crashes=((3, 0.3),), slow=((1, 20.0),), partitions=((2, 0.2, 2.0), (4, 5.0, 25.0)), loss=0.02)


def facts(result: Simulated) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(result).items() if k not in ("placement_cpu_s", "calls")}


@pytest.mark.parametrize("seed", range(4))
def test_with_every_kind_of_fault_nothing_is_lost_runs_twice_or_stays_behind(seed):
    result = simulate(dataclasses.replace(SMALL, seed=seed), faults=BAD_DAY)
    assert (result.num_lost, result.num_twice, result.num_leaked) == (0, 0, 0)
    assert result.num_restarted > 0
    assert result.all_ready_s < 45.0


def test_a_day_without_faults_restarts_nothing():
    result = simulate(SMALL)
    assert (result.num_lost, result.num_restarted, result.num_leaked) == (0, 0, 0)


def test_one_snapshot_for_all_spreads_over_the_fleet():
    result = simulate(dataclasses.replace(SMALL, snapshots=1))
    assert result.num_lost == 0
    assert result.all_ready_s < 3 * simulate(SMALL).all_ready_s


def test_the_same_arguments_have_the_same_result():
    assert facts(simulate(SMALL, faults=BAD_DAY)) == facts(simulate(SMALL, faults=BAD_DAY))


def test_a_fleet_that_is_too_small_loses_nothing_silently():
    result = simulate(dataclasses.replace(SMALL, hosts=4, mean_life_s=1e6))
    assert result.num_lost == 3200 - 4 * round(48 * 1.15 / 0.1) // 16 * 16
    assert result.all_ready_s == float("inf")


def test_a_burst_on_one_host_takes_as_long_as_its_forks():
    measured = Measured(batch_s=0.01, fork_s=0.002, crowd_s=0.0, spread=(1.0,))
    assert predict(measured, 160, 16).all_ready_s == pytest.approx(10 * (0.01 + 16 * 0.002), rel=0.12)


def test_costs_are_found_again_in_bursts_that_were_made_of_them():
    true = Measured(batch_s=0.002, fork_s=0.001, crowd_s=1e-6)
    bursts = [(n, g, burst_s(true, n, g)) for n, g in ((32, 1), (64, 4), (256, 16), (512, 16))]
    assert fitted(bursts) == pytest.approx((0.002, 0.001, 1e-6))
    assert predict(true, 1024, 8).all_ready_s == pytest.approx(burst_s(true, 1024, 8), rel=0.01)


def test_machines_that_are_alive_or_work_make_forks_slower_and_a_slower_control_plane_everything():
    calm = Measured(spread=(1.0,), host_spread=(1.0,), crowd_s=0.0, busy=1.0)

    def took_s(**changes: float) -> float:
        return simulate(SMALL, measured=dataclasses.replace(calm, **changes)).all_ready_s

    alone_s = took_s()
    assert took_s(crowd_s=5e-6) > 1.5 * alone_s
    assert took_s(busy=4.0) > 1.5 * alone_s
    assert took_s(message_s=0.02) > 3 * alone_s


@pytest.mark.parametrize("snapshots", [1, 20])
def test_hosts_that_are_slow_delay_nobody_for_long(snapshots):
    scenario = dataclasses.replace(SMALL, snapshots=snapshots, hosts=12, horizon_s=20.0)
    calm_s = simulate(scenario).all_ready_s
    slow = Faults(slow=((1, 30.0), (5, 8.0)))
    took_s = [simulate(dataclasses.replace(scenario, seed=seed), faults=slow).all_ready_s for seed in range(3)]
    assert max(took_s) < calm_s + 2.0


def test_a_real_burst_is_measured_and_its_prediction_is_of_its_size():
    async def main():
        runtime = opened("namespace", lambda: NamespaceRuntime(max_machines=64))
        try:
            snapshot = await runtime.prepare({"a.py": b"print(1)\n"})
            measured = await measure(runtime, snapshot, plan=((8, 1), (16, 4)), rounds=1)
            rows = await held_out(runtime, snapshot, measured, [(12, 2)], rounds=1)
            return measured, await burst(runtime, snapshot, 20, 8), rows
        finally:
            await runtime.close()

    measured, done, [row] = asyncio.run(main())
    assert min(measured.close_s, measured.exec_s, measured.load_s_per_byte, measured.work_s(4, alive=16)) > 0
    assert len(done.ready_s) == 3
    assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1, abs=0.02)
    assert min(measured.message_s, measured.place_s, measured.started_s, measured.review_s) > 0


def test_the_command_tells_what_came_of_it_and_draws_it(tmp_path, capsys):
    plot = tmp_path / "burst.svg"
    words = ["--machines", "640", "--hosts", "4", "--snapshots", "8", "--calm"]
    assert main([*words, "--plot", str(plot)]) == 0
    assert (
        "640 machines were asked for at once, 16 a request, of 4 hosts: all were ready after" in capsys.readouterr().out
    )
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost_share"] == 0


def test_the_command_fails_where_machines_are_lost(capsys):
    assert main(["--machines", "9000", "--hosts", "1", "--calm"]) == 1
    assert "not all were ready within 60 s: they have room for 1,104" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--group", "65"],
        ["--speed", "0"],
        ["--speed", "nan"],
        ["--speed", "inf"],
        ["--plot", "x.png"],
    ],
)
def test_the_command_refuses_invalid_arguments(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert words[1] in capsys.readouterr().err


def test_a_place_for_the_plot_is_looked_at_before_the_work(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--plot", "no/such/folder/x.svg"])
    assert "no/such/folder/x.svg cannot be written" in capsys.readouterr().err
