"""The root of a gVisor sandbox is made from an image that somebody else built: nothing in it may reach the host."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.gvisor.bundle import make_image_root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    for name in ("bin", "etc", "usr/etc", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "bin/sh").write_text("#!")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\napp:x:12:12::/:/bin/sh\n")
    (root / "etc/group").write_text("app:x:12:\n")
    (root / "etc/shadow").write_text("secret")
    (root / "etc/shadow").chmod(0o600)
    return root


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "file").write_text("the host's")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def seen(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Every path below a folder with its mode and content."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        is_link, mode = path.is_symlink(), path.lstat().st_mode
        content = os.readlink(path) if is_link else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = mode, content
    return found


def test_a_root_has_the_images_folders_mounted_its_own_etc_and_the_users_of_machines(image, root):
    (image / "sbin").symlink_to("bin")
    mounts = make_image_root(image, root)
    assert [(one["destination"], one["source"]) for one in mounts] == [
        (f"/{name}", str(image / name)) for name in ("bin", "usr")
    ]
    assert os.readlink(root / "sbin") == "bin"
    assert (root / "etc/passwd").read_text().splitlines() == [
        "root:x:0:0::/:/bin/sh", "app:x:12:12::/:/bin/sh", "user:x:1000:1000:user:/workspace:/bin/sh",
    ]  # fmt: skip
    assert (root / "etc/group").read_text().splitlines() == ["app:x:12:", "root:x:0:", "user:x:1000:"]
    assert (root / "etc/shadow").read_text() == "secret"
    assert stat.S_IMODE((root / "etc/shadow").stat().st_mode) == 0o600
    assert all((root / name).is_dir() for name in ("proc", "dev", "tmp", "bin"))
    assert (root / ".agent").read_bytes() == b""
    assert "app" in (image / "etc/passwd").read_text()
    assert "user" not in (image / "etc/passwd").read_text()


@pytest.mark.parametrize("name", ["passwd", "group", "new"])
def test_a_link_in_etc_is_not_written_through(image, root, victim, name):
    (image / "etc" / name).unlink(missing_ok=True)
    (image / "etc" / name).symlink_to(victim / "file")
    before = seen(victim)
    make_image_root(image, root)
    assert seen(victim) == before
    if name != "new":
        assert "user:x:1000:" in (root / "etc" / name).read_text()
        assert "the host's" not in (root / "etc" / name).read_text()


@pytest.mark.parametrize("target", ["host", "/usr/etc", "nowhere", "etc", "../../host", "bin/sh"])
def test_an_etc_that_is_a_link_means_a_folder_of_the_image(image, root, victim, target):
    for path in (image / "etc").iterdir():
        path.unlink()
    (image / "etc").rmdir()
    (image / "usr/etc/passwd").write_text("app:x:12:12::/:/bin/sh\n")
    (image / "etc").symlink_to(str(victim) if target == "host" else target)
    before = seen(victim)
    make_image_root(image, root)
    assert seen(victim) == before
    assert (root / "etc").is_dir()
    assert not (root / "etc").is_symlink()
    text = (root / "etc/passwd").read_text()
    assert "user:x:1000:1000:" in text
    assert ("app" in text) == (target == "/usr/etc")


@pytest.mark.parametrize("name", [".agent", "tmp", "proc", "dev", "sys"])
@pytest.mark.parametrize("target", ["host", "host/file", "host/new"])
def test_a_link_where_something_is_mounted_makes_way(image, root, victim, name, target):
    if (image / name).is_dir():
        (image / name).rmdir()
    (image / name).symlink_to(victim.parent / target)
    before = seen(victim)
    make_image_root(image, root)
    assert seen(victim) == before
    assert not (root / name).is_symlink()


def test_a_folder_that_has_the_agents_name_is_not_mounted(image, root):
    (image / ".agent").mkdir()
    mounts = make_image_root(image, root)
    assert "/.agent" not in [one["destination"] for one in mounts]
    assert (root / ".agent").is_file()


def test_a_passwd_that_is_no_file_is_replaced(image, root):
    (image / "etc/passwd").unlink()
    os.mkfifo(image / "etc/passwd")  # an image holds none; a folder that was tampered with may
    (image / "etc/group").unlink()
    (image / "etc/group").mkdir()
    make_image_root(image, root)
    assert (root / "etc/passwd").is_file()
    assert (root / "etc/group").is_file()


NAMES = st.sampled_from(
    ["etc", "tmp", "proc", "dev", "sys", ".agent", "usr", "etc/passwd", "etc/group", "etc/sub", "x"]
)
TARGETS = st.sampled_from(["{host}", "{host}/file", "{host}/new", "..", "../host", "/etc", "etc", "usr", "x", "/", "."])


@settings(max_examples=60, deadline=None)
@given(links=st.dictionaries(NAMES, TARGETS, max_size=6))
def test_no_set_of_links_changes_the_host(links, tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz")
    image, root, victim = place / "image", place / "root", place / "host"
    for folder in (image, root, victim):
        folder.mkdir()
    (victim / "file").write_text("the host's")
    for name, target in sorted(links.items()):
        path = image / name
        if path.parent.is_symlink():
            continue
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.symlink_to(target.format(host=victim))
    before = seen(victim), seen(image)
    make_image_root(image, root)
    assert (seen(victim), seen(image)) == before
    assert "the host's" not in "".join(p.read_text() for p in (root / "etc").iterdir() if not p.is_symlink())
