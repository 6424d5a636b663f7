"""Debian images: apt sources of the host, and errors for missing tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.environments.images.archives import files_of

from etude.environments.images import ImageLimits, ImageStore
from etude.environments.images.debian import AptSource, apt_sources, build_from_debian, tidy
from etude.environments.images.listing import Owner
from etude.environments.images.tree import Tree
from etude.errors import InputError, MachineError

DEB822 = """Types: deb
# a comment
URIs: http://mirror/debian
Suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb-src
URIs: http://mirror/src
Suites: trixie
Components: main

Types: deb
URIs: http://mirror/other
Suites: nodistro
Components: contrib
"""


def test_sources_of_both_forms_are_read(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://no x main\ndeb [arch=amd64 signed-by=/k.gpg] http://one/debian bookworm main contrib\n"
        "deb-src http://no y main\n"
    )
    (tmp_path / "sources.list.d/d.sources").write_text(DEB822)
    (tmp_path / "sources.list.d/e.list").write_text("deb http://flat ./\n\xff\n")
    assert apt_sources(tmp_path) == [
        AptSource("http://one/debian", "bookworm", "/k.gpg"),
        AptSource("http://mirror/debian", "trixie", "/usr/share/keyrings/k.gpg"),
        AptSource("http://mirror/debian", "trixie-updates", "/usr/share/keyrings/k.gpg"),
    ]
    assert apt_sources(tmp_path / "absent") == []


def test_without_the_tool_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="debootstrap") as caught:
        build_from_debian(ImageStore(tmp_path / "images"), "bookworm", mirror="http://mirror")
    assert "apt install debootstrap" in caught.value.hint


@pytest.mark.parametrize("packages", [["--help"], ["a,b"], ["a b"], ["$(x)"], [""]])
def test_a_package_that_is_an_option_or_more_is_refused(tmp_path, packages):
    with pytest.raises(InputError):
        build_from_debian(ImageStore(tmp_path / "images"), "bookworm", packages, mirror="http://mirror")


def test_what_differs_from_run_to_run_is_taken_out(tmp_path: Path):
    root = tmp_path / "root"
    for path in (
        "var/cache/apt/pkgcache.bin",
        "var/log/apt/history.log",
        "etc/hostname",
        "var/lib/dpkg/status",
        "run/x",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    (root / "etc/machine-id").write_text("0123")
    with Tree(root, ImageLimits()) as tree:
        tree.folder("tmp", Owner(0o755))
        tidy(tree)
    kept = {path for path, text in files_of(root).items() if text != "/"}
    assert kept == {"var/lib/dpkg/status", "etc/machine-id"}
    assert (root / "etc/machine-id").read_text() == "uninitialized\n"
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
