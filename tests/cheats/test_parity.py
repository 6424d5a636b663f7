"""The parity probe distinguishes machines that differ, and only those."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.here import opened

from etude.environments import NamespaceRuntime
from etude.redteam.booted import BootedRuntime
from etude.redteam.parity import Parity, Table, auc_of, cross_validated_auc, probe_parity, wilson
from etude.redteam.plain import PlainRuntime


def probed(other: bool, num_machines: int) -> Parity:
    async def main() -> Parity:
        mine = opened("namespace", NamespaceRuntime)
        theirs = PlainRuntime() if other else mine
        try:
            return await probe_parity(mine, theirs, num_machines=num_machines)
        finally:
            await mine.close()
            await theirs.close()

    return asyncio.run(main())


def test_the_parity_probe_does_not_distinguish_machines_of_one_runtime():
    found = probed(False, 20)
    assert found.auc <= found.chance[1] + 0.1
    assert found.auc < 0.85


def test_the_parity_probe_distinguishes_a_namespace_from_a_plain_process_and_names_how():
    found = probed(True, 8)
    assert found.auc == 1.0
    assert found.is_distinguishable
    assert {"environment.path", "file.uid_map"} <= {each.fact for each in found.giveaways}


def test_a_machine_that_booted_has_its_files_a_name_of_its_own_and_runs_commands():
    command = ["sh", "-c", "cat hi.txt /etc/machine-id; hostname"]

    async def main(runtime: BootedRuntime) -> bytes:
        try:
            [machine] = await runtime.fork(await runtime.prepare({"hi.txt": b"hi "}), 1)
            return (await machine.exec(command, key="1", deadline_s=60.0)).output
        finally:
            await runtime.close()

    told = asyncio.run(main(opened("microvm", BootedRuntime)))
    hi, machine_id, name = told.decode().replace("\n", " ").split()
    assert (hi, len(machine_id), len(name)) == ("hi", 32, 12)


def test_an_interval_holds_the_share_and_narrows():
    (low, high), (nearer, farther) = wilson(0.7, 20), wilson(0.7, 200)
    assert 0 < low < nearer < 0.7 < farther < high < 1


def test_a_detector_learns_one_number_among_noise():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    values = rng.normal(size=(60, 30))
    auc, (low, high) = cross_validated_auc(values, labels, num_permutations=40)
    assert low <= auc <= high
    values[:, 7] += 4 * labels
    auc, (_, high) = cross_validated_auc(values, labels, num_permutations=40)
    assert auc > 0.9 > high


def test_texts_become_columns_only_where_two_machines_share_them():
    table = Table.of([{"boot": "a", "os": "x"}, {"boot": "b", "os": "x"}, {"boot": "c", "os": "y"}])
    assert table.columns == ("boot=absent", "os=absent", "os=x")


def test_scores_that_are_all_alike_say_nothing():
    assert auc_of(np.zeros(4), np.array([0, 1, 0, 1])) == 0.5
