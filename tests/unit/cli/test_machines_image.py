"""The commands that make and keep images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.environments.images.archives import oci_layout, repository, tar_of

from etude.cli import main


@pytest.fixture
def image(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(*words: str | Path) -> tuple[int, str, str]:
        command, *rest = map(str, words)
        code = main(["machines", "image", command, *rest, "--store", str(tmp_path / "store")])
        return code, *capsys.readouterr()

    return run


def test_an_image_is_built_named_listed_shown_and_removed(tmp_path, image):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_text("12")
    code, out, _ = image("build", tmp_path / "tree", "--name", "mine", "--workdir", "/w")
    digest = out.split()[0]
    assert (code, out) == (0, f"{digest}  2 files, 2 B, mine\n")
    assert image("list")[1].split() == [digest[:16], "2", "B", "directory", "mine"]
    assert json.loads(image("show", "mine", "--verify")[1])["image"] == {
        "digest": digest, "workdir": "/w", "env": {}, "user": "",
    }  # fmt: skip
    assert image("remove", "mine")[1] == "deleted, 2 B freed\n"
    assert image("list")[1] == ""


@pytest.mark.parametrize("words", [["list"], ["show", "x"], ["remove", "x"], ["collect"]])
def test_looking_into_a_store_that_is_not_there_makes_none(tmp_path, image, words):
    code, _, err = image(*words)
    assert (code, "no images in" in err, "hint: build one: etude machines image build" in err) == (2, True, True)
    assert not (tmp_path / "store").exists()


def test_the_kind_of_an_image_source_is_detected(tmp_path, image):
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/Dockerfile").write_text("FROM scratch\nARG A\nENV B=$A\n")
    oci_layout(tmp_path / "layout", [tar_of([("f", b"1")])])
    repository(tmp_path / "repository", [{"a": b"1"}])
    for source, more, kind in (
        ("docker", ["--arg", "A=1"], "dockerfile"),
        ("docker/Dockerfile", [], "dockerfile"),
        ("layout", [], "oci"),
        ("repository", ["--commit", "main"], "repository"),
        ("repository", ["--from", "directory"], "directory"),
    ):
        code, out, err = image("build", tmp_path / source, *more)
        assert code == 0, err
        assert json.loads(image("show", out.split()[0])[1])["source"] == kind
    assert image("collect")[1].startswith("4 images deleted")


@pytest.mark.parametrize("words", [
    ["build", "absent"], ["build", ".", "--from", "docker"], ["show", "absent"], ["remove", "absent"],
    ["build", ".", "--from", "oci"], ["build", ".", "--from", "repository"], ["build", ".", "--from", "dockerfile"],
])  # fmt: skip
def test_invalid_image_commands_are_errors_in_three_parts(tmp_path, image, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = image(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert "\n  hint: " in err
