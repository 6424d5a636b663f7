"""Machines with images, in real namespaces: the image is never changed, and changes of a machine can be exported."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.here import opened
from tests.unit.environments.images.archives import files_of, tar_of
from tests.unit.environments.network.test_mirror import wheel

from etude.environments import MachineLimits, NamespaceRuntime
from etude.environments.agent.program import BUILT
from etude.environments.images import BadSource, ImageStore, build_from_directory
from etude.environments.images.dockerfile_build import build_from_dockerfile
from etude.environments.images.layers import ChangeExporter
from etude.environments.namespace.images import ImageState
from etude.environments.network.build_network import PACKAGES, build_network_of
from etude.environments.network.packages import Packages
from etude.errors import InputError, MachineError
from etude.records.command import ExecResult
from etude.records.image import Image
from etude.seams import Machine

PROGRAMS = ("sh", "cat", "ls", "id", "rm", "mkdir", "mv", "stat", "touch", "sleep", "ln", "dd", "chmod", "chown")


def host_root(folder: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    """Make a root filesystem from some programs of this host and their libraries."""
    for name in programs:
        program = shutil.which(name)
        if program is None:
            pytest.skip(f"no {name} on this host")
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(program, folder / "bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for word in (word for word in listed.split() if word.startswith("/")):
            target = folder / word[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), target)
    for path, text in {
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235::/home/app:/bin/sh\n",
        "etc/group": "root:x:0:\napp:x:1235:\n",
        "etc/old": "old",
        "data/a": "a",
        "data/b": "b",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "home/app").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    folder = tmp_path_factory.mktemp("machines")
    store = ImageStore(folder / "images")
    record = build_from_directory(
        store, host_root(folder / "root"), image=Image(digest="", workdir="/work/here", env={"GREETING": "hello"})
    )
    store.name("base", record)
    return store


def using(store: ImageStore, test: Callable[[NamespaceRuntime], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(MachineLimits(**limits), images=store, spare=1))
        try:
            await test(runtime)
        finally:
            await runtime.close()

    asyncio.run(main())


async def sh(machine: Machine, line: str, **more) -> str:
    result: ExecResult = await machine.exec(["sh", "-c", line], key=os.urandom(8).hex(), deadline_s=20, **more)
    return f"{result.output.decode()}{'' if result.exit_code == 0 else result.exit_code}"


def test_a_command_starts_as_the_image_says(store):
    async def test(runtime):
        image = store.get("base").image
        assert runtime.info.images
        [machine] = await runtime.fork(await runtime.prepare({"hi.txt": b"hi"}, image=image), 1)
        assert (
            await sh(machine, "id -u; cat hi.txt; echo $GREETING $HOME $PWD; echo *")
            == "0\nhihello /root /work/here\nhi.txt\n"
        )
        assert await sh(machine, "echo /*") == "/bin /data /dev /etc /home /lib /lib64 /proc /tmp /work\n"
        assert await machine.read("hi.txt") == b"hi"
        await machine.write("deep/er", b"1")
        assert await sh(machine, "cat deep/er; stat -c %u:%g deep/er /etc/old") == "10:0\n0:0\n"

    using(store, test)


def test_changes_of_a_machine_are_not_visible_in_others(store):
    async def test(runtime):
        image = store.get("base").image
        one, two = await runtime.fork(await runtime.prepare({}, image=image), 2)
        assert await sh(one, "echo new > /etc/new; rm /etc/old; mv /data /moved; chmod 700 /bin/ls; touch /bin/x") == ""
        assert await sh(one, "echo /etc/*; cat /moved/*") == "/etc/group /etc/new /etc/passwd\nab"
        assert await sh(two, "cat /etc/old /data/*; echo /etc/*") == "oldab/etc/group /etc/old /etc/passwd\n"
        store.verify(image.digest)

    using(store, test)


def test_a_snapshot_holds_what_changed_anywhere_and_nothing_more(store):
    async def test(runtime):
        image = store.get("base").image
        [first] = await runtime.fork(await runtime.prepare({"a": b"1"}, image=image), 1)
        await sh(
            first, "echo 2 > /etc/new; rm /etc/old; rm -r /data; mkdir /data; echo c > /data/c; ln -s /data link; rm a"
        )
        snapshot = await first.snapshot()
        assert snapshot == await first.snapshot()
        await sh(first, "echo 3 > /etc/new")
        for machine in await runtime.fork(snapshot, 2):
            assert await sh(machine, "cat /etc/new link/c; echo /data/* /etc/*; ls") == (
                "2\nc\n/data/c /etc/group /etc/new /etc/passwd\nlink\n"
            )
        packed = await runtime.pack(snapshot, max_bytes=1 << 20)
        assert await runtime.unpack(packed) == snapshot
        assert len(packed) < 20_000

    using(store, test)


def test_a_user_of_the_image_is_who_commands_run_as(store):
    async def test(runtime):
        base = store.get("base").image
        for user, expected in (("app", "1234 1235"), ("1234", "1234 1235"), ("7:8", "7 8")):
            image = Image(digest=base.digest, workdir="/srv", user=user)
            [machine] = await runtime.fork(await runtime.prepare({"mine": b"1"}, image=image), 1)
            assert await sh(machine, "echo $(id -u) $(id -g)") == f"{expected}\n"
            assert await sh(machine, "echo 2 > mine; cat mine") == "2\n"
            assert (await sh(machine, "echo x >> /etc/old; rm /etc/old")).endswith("1")
            assert await sh(machine, "cat /etc/old") == "old"

    if os.geteuid() == 0:
        using(store, test)


@pytest.mark.skipif(os.geteuid() != 0 or not BUILT.exists(), reason="several users need root and the machine agent")
def test_files_are_the_users_in_a_working_directory_of_roots(store):
    async def test(runtime: NamespaceRuntime) -> None:
        image = Image(digest=store.get("base").image.digest, workdir="/data", user="app")
        snapshot = await runtime.prepare({"new/x": b"x", "y": b"y"}, image=image)
        [machine] = await runtime.fork(snapshot, 1)
        if len(runtime.info.users) > 1:
            assert await sh(machine, "stat -c %u . a new new/x y") == "0\n0\n1234\n1234\n1234\n"
        assert await machine.read("new/x") == b"x"

    using(store, test)


def test_commands_run_as_any_user_of_the_image_and_root_rules_over_its_files(store):
    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({}, image=store.get("base").image), 1)
        assert await sh(machine, "id -u; echo $HOME; chown 1234 /data/a; stat -c %u:%g /data/a") == "0\n/root\n1234:0\n"
        assert await sh(machine, "id -u; echo $HOME; rm -f /data/b", user="app", cwd="/") == (
            "1234\n/home/app\nrm: cannot remove '/data/b': Permission denied\n1"
        )
        with pytest.raises(ValueError, match="cannot run as"):
            await sh(machine, "true", user="stranger")
        [again] = await runtime.fork(await machine.snapshot(), 1)
        assert await sh(again, "stat -c %u:%g /data/a /data/b") == "1234:0\n0:0\n"
        assert await sh(again, "cat /proc/1/cmdline; ls /proc/1/fd 2>&1 | cat") == (
            "init\0ls: cannot open directory '/proc/1/fd': Permission denied\n"
        )

    using(store, test)


def test_its_disk_is_bounded_and_a_full_one_is_its_own_trouble(store):
    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({}, image=store.get("base").image), 1)
        assert "No space left" in await sh(
            machine, "for i in 1 2 3; do dd if=/dev/zero of=/data/$i bs=1024k count=2; done"
        )
        with pytest.raises(OSError, match="space"):
            await machine.write("x", bytes(2 << 20))
        assert await sh(machine, "rm /data/1; echo ok > y; cat y") == "ok\n"

    using(store, test, work_bytes=4 << 20)


@pytest.mark.parametrize("image", [
    Image(digest="0" * 64), Image(digest="../../etc"), Image(digest="BASE", user="nobody-here"),
    Image(digest="BASE", workdir="relative"), Image(digest="BASE", workdir="/a/../.."),
    Image(digest="BASE", user="70000"),
    Image(digest="BASE", user="²"),
    Image(digest="BASE", env={"A\0": "1"}),
    Image(digest="BASE", env={"A": "\0"}),
    Image(digest="BASE", env={"": "1"}),
])  # fmt: skip
def test_an_image_that_cannot_be_used_is_an_error_before_any_machine_is_made(store, image):
    async def test(runtime):
        digest = store.get("base").image.digest if image.digest == "BASE" else image.digest
        with pytest.raises(MachineError):
            await runtime.prepare({}, image=msgspec.structs.replace(image, digest=digest))

    using(store, test)


def test_an_image_whose_links_lead_away_gives_machines_that_stay_inside(tmp_path, store):
    root = host_root(tmp_path / "root")
    for name in ("tmp", "proc", "dev"):
        (root / name).symlink_to("/data")
    (root / "out").symlink_to("/../../../../../../etc")
    record = build_from_directory(store, root, image=Image(digest="", workdir="/out/inner"))

    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({"f": b"1"}, image=record.image), 1)
        assert await sh(machine, "cat /etc/inner/f") == "1"

    using(store, test)
    assert not Path("/etc/inner").exists()


def test_an_image_with_machines_cannot_be_removed(store, tmp_path):
    (tmp_path / "tree").mkdir()
    shutil.copytree(store.root(store.get("base").image.digest), tmp_path / "tree", dirs_exist_ok=True, symlinks=True)
    (tmp_path / "tree/one-more").write_text("")
    record = build_from_directory(store, tmp_path / "tree")

    async def test(runtime):
        await runtime.fork(await runtime.prepare({}, image=record.image), 1)
        with pytest.raises(InputError, match="in use"):
            store.remove(record.image.digest)

    using(store, test)
    assert store.remove(record.image.digest) > 0


def test_run_of_a_dockerfile_changes_the_image_as_its_command_did(tmp_path, store):
    (tmp_path / "Dockerfile").write_text(
        """FROM base AS built
ARG WHAT=made
ENV KEPT=1
WORKDIR /out
RUN echo $WHAT $KEPT $GREETING > result && rm /etc/old && rm -r /data && mkdir /data
RUN ["sh", "-c", "cat result > /data/again"]
SHELL ["/bin/sh", "-f", "-c"]
RUN <<EOF
#!/bin/sh -e
# what its first line names is what runs it
echo one * > lines
EOF
RUN cat <<EOF >> lines && echo * >> lines
$WHAT
EOF
RUN <<-EOF
\techo three four >> lines
EOF
FROM scratch
COPY --from=built /out/result /data/again /out/lines /
"""
    )

    async def test(runtime):
        record = await build_from_dockerfile(store, tmp_path, runtime=runtime, arguments={"WHAT": "built"})
        assert files_of(store.root(record.image.digest)) == {
            "again": "built 1 hello\n",
            "result": "built 1 hello\n",
            "lines": "one result\nbuilt\n*\nthree four\n",
        }
        middle = await build_from_dockerfile(
            store, tmp_path, runtime=runtime, arguments={"WHAT": "built"}, target="built"
        )
        names = {entry.path for entry in store.listing(middle.image.digest)}
        assert {"data", "data/again", "out/result", "bin/sh"} <= names
        assert not names & {"etc/old", "data/a", "tmp/x"}
        assert {entry.uid for entry in store.listing(middle.image.digest)} == {0}
        assert middle.image.env == {"GREETING": "hello", "KEPT": "1"}
        (tmp_path / "Dockerfile").write_text("FROM base\nRUN echo no good; exit 3\n")
        with pytest.raises(BadSource, match=r"(?s)line 2: RUN ended with 3"):
            await build_from_dockerfile(store, tmp_path, runtime=runtime)

    using(store, test)


def test_a_foreign_snapshot_reaches_nothing_but_the_machines_root(store):
    layer = tar_of([
        ("proc/sys/kernel/hostname", b"x"), ("dev/null", b"x"), ("tmp/x", b"x"), ("way", "/proc/sys"),
        ("way/kernel", b"x"),
    ])  # fmt: skip

    async def test(runtime):
        image = store.get("base").image
        snapshot = await runtime.unpack(ImageState(image, b"", layer).pack())
        with pytest.raises(MachineError, match="is a circular link or a mount"):
            await runtime.fork(snapshot, 1)
        for bad in (
            b"",
            b"x" * 100,
            ImageState(image, b"", b"")._replace(tree=b"x").pack(),
            ImageState(image, b"", b"x").pack(),
        ):
            with pytest.raises((ValueError, MachineError)):
                await runtime.fork(await runtime.unpack(bad), 1)

    using(store, test)


def test_changes_past_the_bound_are_refused(store):
    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({"f": bytes(5000)}, image=store.get("base").image), 1)
        assert isinstance(machine, ChangeExporter)
        with pytest.raises(ValueError, match="larger than 4000"):
            await machine.changes(io.BytesIO(), max_bytes=4000)

    using(store, test)


WITHOUT_PRIVILEGE = """
import asyncio, sys
from etude.environments import NamespaceRuntime
from etude.environments.images import ImageStore, build_from_directory
from etude.records.image import Image
async def main():
    store = ImageStore(sys.argv[1] + "/images")
    record = build_from_directory(store, sys.argv[1] + "/root", image=Image(digest="", workdir="/w"))
    store.verify(record.image.digest)
    runtime = NamespaceRuntime(images=store, spare=0)
    [one] = await runtime.fork(await runtime.prepare({"f": b"1"}, image=record.image), 1)
    line = "id -u; cat f; rm /etc/old; rm -r /data; mkdir /data; echo 2 > /etc/new; stat -c %u /bin/sh"
    print((await one.exec(["sh", "-c", line], key="1", deadline_s=20)).output)
    [two] = await runtime.fork(await one.snapshot(), 1)
    print((await two.exec(["sh", "-c", "cat f /etc/new; echo /etc/* /data/*"], key="1", deadline_s=20)).output)
    await runtime.close()
    print(record.image.digest)
asyncio.run(main())
"""


@pytest.mark.parametrize("user", [["--map-root-user"], ["--map-user=1000", "--map-group=1000"]])
def test_without_privilege_a_machine_works_alike_with_one_user(store, tmp_path, user):
    """In a user namespace with a single user."""
    host_root(tmp_path / "root")
    command = ["unshare", "--user", *user, sys.executable, "-c", WITHOUT_PRIVILEGE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "unshare" in done.stderr or "machines need user namespaces" in done.stderr:
        pytest.skip("no user namespaces in user namespaces here")
    assert done.returncode == 0, done.stderr
    first, second, digest = done.stdout.splitlines()
    assert first == repr(b"0\n10\n")
    assert second == repr(b"12\n/etc/group /etc/new /etc/passwd /data/*\n")
    assert digest == build_from_directory(store, tmp_path / "root").image.digest, "the same tree, whoever builds it"


FETCH = """exec 3<>/dev/tcp/${PIP_INDEX_URL:7:9}/$(echo $PIP_INDEX_URL | sed 's,.*:\\([0-9]*\\)/.*,\\1,')
printf 'GET /pip/%s HTTP/1.0\\r\\n\\r\\n' $1 >&3
sed '1,/^.$/d' <&3 > $2
"""


def test_a_run_reaches_the_packages_of_its_store_and_nothing_else(tmp_path, store):
    root = host_root(tmp_path / "with-bash", (*PROGRAMS, "bash", "sed"))
    store.name("with-bash", build_from_directory(store, root, image=Image(digest="", workdir="/")))
    made = wheel(tmp_path, "etude_toy", "1.0")
    Packages(store.path / PACKAGES).take(made)
    (tmp_path / "fetch").write_text(FETCH)
    (tmp_path / "Dockerfile").write_text(
        f"FROM with-bash\nCOPY fetch /\nRUN bash /fetch simple/etude-toy/ /page\n"
        f"RUN bash /fetch files/etude-toy/{made.name} /toy.whl\nENV A=1\n"
    )

    async def test(runtime):
        with pytest.raises(BadSource, match="RUN ended with"):
            await build_from_dockerfile(store, tmp_path, runtime=runtime)
        record = await build_from_dockerfile(store, tmp_path, runtime=runtime, outlets=build_network_of(store.path))
        root = store.root(record.image.digest)
        assert (root / "toy.whl").read_bytes() == made.read_bytes()
        assert "sha256=" in (root / "page").read_text()
        assert record.image.env == {"A": "1"}

    using(store, test)
