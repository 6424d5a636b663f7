"""Unpacking packages into a root filesystem never writes outside of it, whatever links they have."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from etude.environments.microvm.packages import Package
from etude.environments.microvm.rootfs import unpack

if shutil.which("dpkg-deb") is None:
    pytest.skip("dpkg-deb builds the packages", allow_module_level=True)


def package(folder: Path, name: str, *, files: dict[str, str] | None = None, links: dict[str, str] | None = None):
    """Make a real .deb with these files and links."""
    tree = folder / f"{name}.tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: m <m@example.org>\nDescription: d\n"
    )
    for path, text in (files or {}).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    for path, target in (links or {}).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).symlink_to(target)
    path = folder / f"{name}_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "-Znone", str(tree), str(path)], check=True, capture_output=True)
    return Package(name, "1", "", path)


def test_packages_become_a_root_with_their_modes_and_links(tmp_path):
    one = package(tmp_path, "one", files={"bin/hello": "hi", "usr/share/doc/one/copyright": "c"}, links={"usr/x": "y"})
    os.chmod(tmp_path / "one.tree/bin/hello", 0o4755)
    os.link(tmp_path / "one.tree/bin/hello", tmp_path / "one.tree/bin/again")
    subprocess.run(["dpkg-deb", "--build", "-Znone", str(tmp_path / "one.tree"), str(one.path)], check=True)
    root = tmp_path / "root"
    unpack([one], root)
    assert (root / "usr/bin/hello").read_text() == "hi"
    assert stat.S_IMODE((root / "usr/bin/hello").stat().st_mode) == 0o4755
    assert (root / "usr/bin/again").stat().st_ino == (root / "usr/bin/hello").stat().st_ino
    assert os.readlink(root / "bin") == "usr/bin"
    assert os.readlink(root / "usr/x") == "y"
    assert not (root / "usr/share/doc").exists()
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert os.readlink(root / "var/run") == "/run"
    assert "user:x:1000" in (root / "etc/passwd").read_text()


@pytest.mark.parametrize("name", ["opt/data", "etc", "srv"])
def test_a_packages_link_leads_no_other_package_to_the_host(tmp_path, name):
    host = tmp_path / "host"
    host.mkdir()
    (host / "kept").write_text("the host's")
    first = package(tmp_path, "first", links={name: str(host)})
    second = package(tmp_path, "second", files={f"{name}/new": "x", f"{name}/kept": "x"})
    unpack([first, second], tmp_path / "root")
    assert [path.name for path in host.iterdir()] == ["kept"]
    assert (host / "kept").read_text() == "the host's"
    assert stat.S_IMODE(host.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["etc/hosts", "etc/passwd", "etc/machine-id"])
def test_files_of_every_machine_are_not_written_through_a_packages_link(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("the host's")
    unpack([package(tmp_path, "one", links={name: str(victim)})], tmp_path / "root")
    assert victim.read_text() == "the host's"
    assert not (tmp_path / "root" / name).is_symlink()
