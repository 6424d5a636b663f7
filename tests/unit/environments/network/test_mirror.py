"""A mirror serves what was fetched and is allowed, to the real tools where they are there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.here import opened
from tests.unit.environments.images.archives import tar_of

from etude.environments import NamespaceRuntime
from etude.environments.network import Mirror, Package, Packages, PackageSpec, listen_on_loopback, parse_package_spec
from etude.environments.network import mirror as mirroring
from etude.environments.network.http import BadRequest, parse_head
from etude.errors import InputError, MachineError, StoreError


def wheel(folder: Path, name: str, version: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "VALUE = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        for at, text in {**files, f"{info}/RECORD": "".join(f"{n},,\n" for n in files)}.items():
            file.writestr(at, text)
    return path


def add(packages: Packages, kind: str, name: str, version: str, path: Path, facts: str = "") -> Package:
    """As a fetch would have left it."""
    data = path.read_bytes()
    package = Package(
        kind=kind, name=name, version=version, file=path.name, sha256=hashlib.sha256(data).hexdigest(),
        size=len(data), facts=facts,
    )  # fmt: skip
    packages.path(package).write_bytes(data)
    packages.known.append(package)
    (packages.folder / "packages.json").write_bytes(msgspec.json.encode(packages.known))
    return package


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    found = Packages(tmp_path / "packages")
    add(found, "pip", "etude-toy", "1.0", wheel(tmp_path, "etude_toy", "1.0"))
    add(found, "pip", "etude-other", "2.0", wheel(tmp_path, "etude_other", "2.0"))
    tarball = tmp_path / "toy-1.0.0.tgz"
    import gzip

    tarball.write_bytes(gzip.compress(tar_of([("package/package.json", b'{"name": "@e/toy", "version": "1.0.0"}')])))
    add(found, "npm", "@e/toy", "1.0.0", tarball, json.dumps({"name": "x", "dist": {"tarball": "http://evil/"}}))
    deb = tmp_path / "toy_1_all.deb"
    deb.write_bytes(b"!<arch>\n")
    add(found, "apt", "toy", "1", deb, "Package: toy\nFilename: pool/evil\nDepends: libc6\nSHA256: 00\nSize: 1")
    return found


def get(mirror: Mirror, path: str, method: str = "GET") -> tuple[int, bytes]:
    answer = mirror.answer(parse_head(f"{method} {path} HTTP/1.1\r\nHost: h:1\r\n\r\n".encode()))
    return answer.status, answer.body


def test_an_index_names_what_is_allowed_with_its_hash(packages):
    mirror = Mirror(packages, {parse_package_spec("pip:etude_toy==1.0")})
    assert b"etude-toy" in get(mirror, "/pip/simple/")[1]
    assert b"etude-other" not in get(mirror, "/pip/simple/")[1]
    status, page = get(mirror, "/pip/simple/Etude_Toy/")
    assert status == 200
    assert packages.known[0].sha256.encode() in page
    for path in ("/pip/simple/etude-other/", f"/pip/files/etude-other/{packages.known[1].file}", "/npm/@e%2ftoy"):
        assert get(mirror, path)[0] == 404


def test_documents_lead_to_this_mirror_and_nowhere_else(packages):
    mirror = Mirror(packages)
    document = json.loads(get(mirror, "/npm/@e%2ftoy")[1])
    assert document["versions"]["1.0.0"]["dist"] == {"tarball": "http://h:1/npm/-/files/@e/toy/toy-1.0.0.tgz"}
    stanza = get(mirror, "/apt/./Packages")[1].decode()
    assert "Depends: libc6\nFilename: ./pool/toy/toy_1_all.deb\n" in stanza
    assert "evil" not in stanza
    assert get(mirror, "/apt/pool/toy/toy_1_all.deb")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/pip",
        "/pip/files/etude-toy/../../packages.json",
        "/pip/files/etude-toy/%2e%2e/x",
        "/files/x",
        "/npm/",
        "/apt/pool/x",
        "/pip/simple/a/b",
        "//",
        "/npm/-/files/x",
        "/%00",
        "http://h/pip/simple/",
    ],
)
def test_other_paths_of_a_mirror_are_not_found(packages, path):
    assert get(Mirror(packages), path)[0] == 404


def test_a_mirror_refuses_methods_other_than_reading(packages):
    assert get(Mirror(packages), "/pip/simple/", "POST")[0] == 405


def test_a_file_that_is_not_what_was_fetched_is_not_served(packages):
    packages.path(packages.known[0]).write_bytes(b"other")
    with pytest.raises(StoreError, match="damaged"):
        Mirror(packages)


def test_a_damaged_list_is_an_error(packages):
    (packages.folder / "packages.json").write_text('[{"kind": 1}]')
    with pytest.raises(StoreError, match="damaged"):
        Packages(packages.folder)


@pytest.mark.parametrize(
    "text", ["pip:a", "pip:--x==1", "npm:a", "npm:../a@1", "apt:A=1", "gem:a==1", "", "pip:a==1;x"]
)
def test_what_names_no_package_and_version_is_refused(text):
    with pytest.raises(InputError, match="not a package"):
        parse_package_spec(text)


def test_a_package_that_cannot_be_had_is_told_in_the_tools_words(tmp_path):
    with pytest.raises(MachineError, match="pip could not fetch"):
        Packages(tmp_path).fetch([PackageSpec("pip", "etude-there-is-no-such-package", "0.0")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["files"]


async def serving(mirror: Mirror, listener: socket.socket, command: list[str], cwd: Path) -> tuple[int, str]:
    await mirror.serve(listener)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd
        )
        async with asyncio.timeout(600):
            out, _ = await process.communicate()
        return process.returncode or 0, out.decode()
    finally:
        await mirror.close()


def test_pip_installs_from_it_and_not_what_is_not_allowed(tmp_path, packages):
    for name, works in (("etude-toy", True), ("etude-other", False)):
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/pip/simple"
        command = [
            sys.executable,
            "-m",
            "pip",
            "--isolated",
            "download",
            "--no-cache-dir",
            "-q",
            "--index-url",
            url,
            name,
        ]
        mirror = Mirror(packages, {parse_package_spec("pip:etude-toy==1.0")})
        code, out = asyncio.run(serving(mirror, listener, [*command, "--dest", str(tmp_path / name)], tmp_path))
        assert (code == 0) is works, out
    assert (tmp_path / "etude-toy/etude_toy-1.0-py3-none-any.whl").exists()


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this host")
def test_npm_installs_from_it(tmp_path, packages):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/npm"
    (tmp_path / "project").mkdir()
    command = ["npm", "install", "--registry", url, "--cache", str(tmp_path / "cache"), "--no-audit", "@e/toy@1.0.0"]
    code, out = asyncio.run(serving(Mirror(packages), listener, command, tmp_path / "project"))
    assert code == 0, out
    assert (tmp_path / "project/node_modules/@e/toy/package.json").exists()


@settings(max_examples=150)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60))
def test_any_path_is_answered_with_200_or_404_or_a_bad_request(tmp_path_factory, path):
    mirror = Mirror(Packages(tmp_path_factory.getbasetemp() / "none"))
    with contextlib.suppress(BadRequest):
        assert get(mirror, "/" + path)[0] in (200, 404)


def test_a_socket_inside_of_a_network_of_its_own_is_served_from_here(tmp_path, packages):
    """The machine here: a process with a network namespace in which not even loopback is up."""
    try:
        machine = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this host")
    with machine:
        machine.stdin.write(b"ready\n")
        machine.stdin.flush()
        if not machine.stdout.readline():
            pytest.skip("no user namespaces here")
        listener = listen_on_loopback(machine.pid, 8080)
        ask = (
            "import urllib.request as r; "
            "print(r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8080/pip/simple/').status)"
        )
        command = ["nsenter", f"--target={machine.pid}", "--user", "--net", sys.executable, "-c", ask]
        code, out = asyncio.run(serving(Mirror(packages), listener, command, tmp_path))
        machine.stdin.close()
    assert (code, out) == (0, "200\n")
    with pytest.raises(MachineError, match="could be made"):
        listen_on_loopback(machine.pid, 8080)


def test_a_machine_without_a_network_reaches_a_mirror_and_nothing_else(packages):
    async def main() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        mirror = Mirror(packages)
        try:
            one, two = await runtime.fork(await runtime.prepare({"ask.py": ASK}), 2)
            await mirror.serve(await one.listen(8080))
            answers = [await m.exec(["python", "ask.py"], key="1", deadline_s=20) for m in (one, two)]
            assert [answer.output for answer in answers] == [b"200\n", b"unreachable\n"]
        finally:
            await mirror.close()
            await runtime.close()

    asyncio.run(main())


ASK = b"""
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8080/pip/simple/", timeout=10).status)
except urllib.error.URLError:
    print("unreachable")
"""


def test_a_client_that_neither_reads_nor_sends_is_disconnected(tmp_path, monkeypatch):
    for name in ("_REQUEST_S", "_ANSWER_S", "_CLOSE_S"):
        monkeypatch.setattr(mirroring, name, 0.2)
    large = tmp_path / "large.whl"
    large.write_bytes(bytes(1 << 25))
    packages = Packages(tmp_path / "packages")
    add(packages, "pip", "large", "1", large)

    async def main() -> None:
        mirror = Mirror(packages)
        listener = socket.create_server(("127.0.0.1", 0))
        await mirror.serve(listener)
        ends = [await asyncio.open_connection(*listener.getsockname(), limit=1) for _ in range(2)]
        ends[0][1].write(b"GET /pip/files/large/large.whl HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(100):
            for reader, _ in ends[1:]:
                assert await reader.read() == b""  # who never asks is told that it is over
            await asyncio.gather(*mirror._serving)
        for _, writer in ends:
            writer.transport.abort()
        await mirror.close()

    asyncio.run(main())
