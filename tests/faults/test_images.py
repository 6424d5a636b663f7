"""Images with faults: a full disk, kill -9 during a build, concurrent builds, and damaged files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.environments.images.archives import oci_layout, repository, tar_of

from etude.environments.images import ImageStore, build_from_directory, build_from_oci
from etude.errors import EtudeError, StoreError

FULL = """
import os, subprocess, sys
from pathlib import Path
from etude.environments.images import ImageStore, build_from_directory, build_from_repository
from etude.errors import StoreError
at = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(at / "disk")], check=True)
store = ImageStore(at / "disk/images")
for source, build in (("large", build_from_directory), ("many", build_from_directory), ("repo", build_from_repository)):
    try:
        build(store, at / source)
    except StoreError as error:
        print(error.what.startswith("images cannot be stored"), "free space" in error.hint)
    print(os.listdir(store.path / "building"), store.images())
record = build_from_directory(store, at / "small")
store.name("small", record)
store.verify(record.image.digest)
print(len(store.images()))
"""


def test_a_full_disk_raises_an_error_and_leaves_no_files(tmp_path):
    for name, size in (("large", 3 << 20), ("small", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(os.urandom(size))
    (tmp_path / "many").mkdir()
    for number in range(400):
        (tmp_path / "many" / str(number)).write_bytes(bytes(4096))
    # its files have room on the disk, and their pack beside them has not: it is git that is told
    repository(tmp_path / "repo", [{"file": os.urandom(700_000)}])
    (tmp_path / "disk").mkdir()
    inside = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    command = ["unshare", *inside, sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "unshare" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True", "[] []"] * 3 + ["1"]


BUILDING = """
import sys
from etude.environments.images import ImageStore, build_from_oci
build_from_oci(ImageStore(sys.argv[1]), sys.argv[2])
"""


def test_a_build_that_is_killed_is_swept_and_not_mistaken_for_an_image(tmp_path):
    pipe = tmp_path / "archive"
    os.mkfifo(pipe)
    process = subprocess.Popen([sys.executable, "-c", BUILDING, str(tmp_path / "images"), str(pipe)])
    try:
        with open(pipe, "wb", buffering=0) as archive:
            whole = tar_of([("f", bytes(2 << 20))])
            archive.write(whole[: 1 << 20])  # more than a pipe holds: when it is written, much of it has been unpacked
            other = ImageStore(tmp_path / "images")
            assert len(list((other.path / "building").iterdir())) == 2, "a living builder's folders are left alone"
            process.send_signal(signal.SIGKILL)
            process.wait(20)
    finally:
        process.kill()
        process.wait(20)
    store = ImageStore(tmp_path / "images")
    assert list((store.path / "building").iterdir()) == []
    assert store.images() == []


def test_builders_of_one_image_at_once_make_one_image(tmp_path):
    layout = oci_layout(tmp_path / "layout", [tar_of([(f"f{i}", os.urandom(1000)) for i in range(50)])])
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: build_from_oci(ImageStore(tmp_path / "images"), layout), range(8)))
    store = ImageStore(tmp_path / "images")
    assert {record.image.digest for record in made} == {record.image.digest for record in store.images()}
    assert len(store.images()) == 1
    store.verify(made[0].image.digest)
    assert list((store.path / "building").iterdir()) == []


def test_a_store_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="images cannot be stored"):
        ImageStore(tmp_path / "file" / "images")


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[", b"\xff" * 100, b'{"image": {"digest": "../../etc"}, "source": "x"}']
)
def test_a_damaged_record_is_an_error_with_a_hint(tmp_path, damage):
    (tmp_path / "source").mkdir()
    store = ImageStore(tmp_path / "images")
    record = build_from_directory(store, tmp_path / "source")
    store.name("mine", record)
    (store.path / "names" / "mine").write_bytes(damage)
    with pytest.raises(EtudeError) as caught:
        store.get("mine")
    assert caught.value.hint
    (store.path / record.image.digest / "image.json").write_bytes(damage)
    with pytest.raises(EtudeError):
        store.get(record.image.digest)
