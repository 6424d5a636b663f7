"""The peers of the machines benchmark run the commands that it measures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.machines.burst import peer_loop
from benchmarks.machines.peers import Bubblewrap, Bundle, Peer


def try_it(name: str, folder: Path) -> int:
    peer: Peer = Bubblewrap(folder) if name == "bwrap" else Bundle(name, folder)
    with peer.machine() as machine:
        peer.exec_true(machine)
    return len(peer_loop(peer, 0.01, 2, python=True).answered)


@pytest.mark.parametrize("name", ["bwrap", "runc", "crun"])
def test_a_machine_of_others_starts_answers_and_ends(name, tmp_path):
    with ThreadPoolExecutor(1) as thread:  # crun needs a view of the mounts of its own
        try:
            assert thread.submit(try_it, name, tmp_path).result(60) >= 2
        except RuntimeError as error:
            pytest.skip(str(error))
