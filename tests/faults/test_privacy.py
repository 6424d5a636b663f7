"""kill -9 of a process that captures, and of one that erases; a full disk while a subject is erased."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.served_answers import served_answer
from tests.small_disk import fill, small_disk

from etude.errors import PrivacyError
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject, SubjectErased

ROOT = Path(__file__).parents[2]
ACME, BOB = Subject.of("acme"), Subject.of("acme", "bob")
CAPTURES = """
import sys
from pathlib import Path
from tests.served_answers import served_answer
from etude.privacy import CaptureWriter
writer = CaptureWriter(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    writer.offer(served_answer("bob", said="x" * 5000))
"""
ERASES = """
import sys
from pathlib import Path
from etude.privacy import PrivacyFolder, Subject
with PrivacyFolder(Path(sys.argv[1])) as folder:
    print("ready", flush=True)
    folder.erase(Subject.of("acme", "bob"))
"""


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], env={**os.environ, "PYTHONPATH": path}, text=True, stdout=-1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str], after_s: float) -> None:
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_every_record_is_whole(tmp_path, seed):
    with PrivacyFolder(tmp_path) as folder:
        folder.consent.set(ACME, Level.TRAIN)
    kill(started(CAPTURES, tmp_path), random.Random(seed).uniform(0.1, 0.8))
    with PrivacyFolder(tmp_path) as folder:
        records = folder.records.of(folder.keys.names(BOB))
        for record in records:
            content = folder.records.read(record)
            assert content.token_ids.tolist() == [ord("x")] * 5000
            assert len(content.logprobs) == content.num_sampled == 5000
        assert folder.records.counts().get("captured", 0) == len(records)
        folder.erase(BOB)
        assert folder.records.of(folder.keys.names(BOB)) == []


@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_of_an_erasure_a_record_is_whole_or_unreadable_and_erasing_again_ends_it(tmp_path, seed):
    with PrivacyFolder(tmp_path) as folder:
        folder.consent.set(ACME, Level.TRAIN)
    process = started(CAPTURES, tmp_path)
    with PrivacyFolder(tmp_path) as folder:
        while len(folder.records.of(folder.keys.names(BOB))) < 100:
            time.sleep(0.02)
        kill(process, 0)
        kill(started(ERASES, tmp_path), random.Random(seed).uniform(0, 0.02))
        key = folder.keys.find(folder.keys.names(BOB))
        for record in folder.records.of(folder.keys.names(BOB)):
            if key is None:
                with pytest.raises(SubjectErased):
                    folder.records.read(record)
            else:
                assert folder.records.read(record).num_sampled == 5000
        folder.erase(BOB)
        assert folder.keys.find(folder.keys.names(BOB)) is None
        assert folder.records.of(folder.keys.names(BOB)) == []
        assert not folder.consent.allowed(BOB, Level.METRICS)


def test_a_full_disk_does_not_keep_a_key_alive(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as disk, PrivacyFolder(disk / "privacy") as folder:
        folder.consent.set(ACME, Level.TRAIN)
        writer = CaptureWriter(disk / "privacy")
        writer.offer(served_answer("bob"))
        assert writer.close(60)
        names = folder.keys.names(BOB)
        (record,) = folder.records.of(names)
        ballast = fill(disk)
        with contextlib.suppress(PrivacyError):  # the change of consent may find no place
            folder.erase(BOB)
        assert folder.keys.find(names) is None
        with pytest.raises(SubjectErased):
            folder.records.read(record)
        ballast.unlink()
        folder.erase(BOB)
        assert folder.records.of(names) == []
