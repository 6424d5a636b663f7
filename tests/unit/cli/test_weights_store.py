"""`etude weights` on a store, as somebody with his own trainer and engine calls it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from etude.cli import main, weights_store
from etude.cli.arguments import duration
from etude.run import RunFolder
from etude.stores import open_store
from etude.weights import Channel
from etude.weights.files.checkpoint import CheckpointWriter, index_of, layout, read_checkpoint
from etude.weights.files.folder import CheckpointFolder
from etude.weights.tensors import Tensor, same_bits


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four checkpoint directories, a step apart each; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.w": torch.randn(100, 200, generator=generator).mul(0.02).bfloat16() for i in range(3)}
    for step in range(4):
        Path(f"c{step}").mkdir()
        save_file(tensors, f"c{step}/model.safetensors", {"format": "pt"})
        tensors = {
            name: (w.float() + 1e-5 * torch.randn(w.shape, generator=generator)).bfloat16()
            for name, w in tensors.items()
        }
    return [f"c{step}" for step in range(4)]


def holds(folder: str, checkpoint: str) -> bool:
    a, b = read_checkpoint(Path(folder)).tensors, read_checkpoint(Path(checkpoint)).tensors
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def test_checkpoints_travel_through_a_store_into_a_directory(steps, capsys) -> None:
    assert main(["weights", "publish", "c0", "store"]) == 0
    assert capsys.readouterr().out.startswith("v000000-")
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c0")
    for step in (1, 2, 3):
        assert main(["weights", "publish", f"c{step}", "store"]) == 0
        assert "times smaller than the weights" in capsys.readouterr().out
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("live has it, verified")
    assert said[1].startswith("v000003-")
    assert "lists of" in said[1]
    assert holds("live", "c3")
    assert main(["weights", "log", "store"]) == 0
    said = capsys.readouterr().out
    assert all(f"v00000{step}-" in said for step in range(4))
    assert main(["weights", "diff", "1", "3", "store"]) == 0
    assert "layers.2.w" in capsys.readouterr().out
    assert main(["weights", "fsck", "store"]) == 0
    assert "4 versions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"q": torch.zeros(3, 3)}, "tensors that differ: 4 (3 missing, 1 new), 'layers.0.w' first: none there, bf16"),
        (
            {f"layers.{i}.w": torch.zeros(100, 200) for i in range(3)},
            "tensors that differ: 3 (3 of another dtype or shape), 'layers.0.w' first: f32 [100, 200] there, bf16",
        ),
    ],
)
def test_a_checkpoint_with_other_tensors_than_the_heads_is_published_by_a_flag_alone(
    steps, capsys, tensors, says
) -> None:
    main(["weights", "publish", "c0", "store"])
    Path("other").mkdir()
    save_file(tensors, "other/model.safetensors", {"format": "pt"})
    before = sorted(Path("store").rglob("*"))
    assert main(["weights", "publish", "other", "store"]) == 2
    said = capsys.readouterr().err
    assert "other has other tensors than channel 'policy' of store" in said
    assert says in said
    assert "--other-tensors" in said.split("hint: ")[1]
    assert sorted(Path("store").rglob("*")) == before
    assert main(["weights", "publish", "other", "store", "--other-tensors"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "other")


@pytest.mark.parametrize("newer", [False, True])
def test_files_of_the_directory_that_were_damaged_are_named_and_repaired(steps, capsys, newer) -> None:
    follow = ["weights", "follow", "store", "--apply", "live", "--once"]
    main(["weights", "publish", "c0", "store"])
    main(follow)
    file = Path("live/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    if newer:
        main(["weights", "publish", "c1", "store"])
    capsys.readouterr()
    assert main(follow) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("v000000-")
    assert said[0].endswith(f": damaged, or changed by another program: {file}; will be repaired")
    assert said[1].startswith(f"v00000{int(newer)}-")
    assert said[1].endswith(f"; repaired: {file}")
    assert holds("live", "c1" if newer else "c0")
    assert main(follow) == 0
    assert "damaged" not in (said := capsys.readouterr().out)
    assert "repaired" not in said


def test_of_the_directorys_shards_only_the_damaged_ones_are_named(steps, capsys) -> None:
    tensors = dict(read_checkpoint(Path("c0")).tensors)
    headers = layout(tensors, 40_000)
    with CheckpointWriter(Path("live"), headers, index_of(headers)) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    main(["weights", "publish", "c0", "store"])
    follow = ["weights", "follow", "store", "--apply", "live", "--once"]
    assert main(follow) == 0
    shards = sorted(Path("live").glob("*.safetensors"))
    assert len(shards) == 3
    data = bytearray(shards[1].read_bytes())
    data[-1] ^= 1
    shards[1].write_bytes(data)
    capsys.readouterr()
    assert main(follow) == 0
    assert capsys.readouterr().out.endswith(f"; repaired: {shards[1]}\n")
    assert holds("live", "c0")


def test_a_whole_checkpoint_follows_a_version_that_was_published_in_parts(steps, capsys) -> None:
    tensors = read_checkpoint(Path("c0")).tensors
    first = tensors.pop("layers.0.w")
    rows = {f"layers.0.w[{i}:{i + 50}]": Tensor("bf16", (50, 200), first.codes[i * 200 :][:10_000]) for i in (0, 50)}
    Channel(open_store("store")).publish({**tensors, **rows}, step=0, parent=None, rollout_ids=[])
    assert main(["weights", "publish", "c1", "store"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c1")


def test_publish_and_follow_take_a_channel_name_and_a_step(steps, capsys) -> None:
    assert main(["weights", "publish", "c0", "store", "--name", "fp8", "--step", "40"]) == 0
    assert capsys.readouterr().out.startswith("v000040-")
    assert main(["weights", "follow", "store", "--apply", "live", "--once", "--name", "fp8"]) == 0
    assert main(["weights", "follow", "store", "--apply", "other", "--once"]) == 1
    assert "channel 'policy' of store has no version" in capsys.readouterr().err


def test_garbage_collection_keeps_what_the_head_needs(steps, capsys) -> None:
    for step in steps:
        main(["weights", "publish", step, "store"])
    for _ in range(2):
        assert main(["weights", "gc", "store", "--keep", "0s"]) == 0
    assert "keys deleted" in capsys.readouterr().out
    assert main(["weights", "fsck", "store"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c3")


def test_a_lost_object_is_found_with_a_hint(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    for file in Path("store/objects").rglob("*"):
        if file.is_file():
            file.unlink()
    assert main(["weights", "fsck", "store"]) == 1
    said = capsys.readouterr()
    assert ": 1 problem, 0 notices" in said.out
    assert said.out.startswith("v000000-")
    assert "\n1 version, 1 object, " in said.out
    assert "error: 1 problem in store: v000000-" in said.err
    assert ", is one of them\n  hint: " in said.err


def test_a_check_says_which_versions_are_lost_and_that_the_newest_is_whole(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    main(["weights", "publish", "c1", "store"])
    versions = sorted(one.stem.rpartition("-")[0] for one in Path("store/manifests").rglob("*.json"))
    for file in Path("store/objects").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    main(["weights", "publish", "c2", "store"])
    newest = capsys.readouterr().out.splitlines()[-1].split(": ")[0]
    assert main(["weights", "fsck", "store"]) == 1
    said = capsys.readouterr().err
    assert "error: 2 problems in store: v000000-" in said
    assert f"; affected: {versions[0]}, {versions[1]}; the newest, {newest}, is intact\n  hint: " in said
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c2")


def test_where_a_run_is_checked_a_store_is_told_of_the_command_for_stores(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    assert main(["fsck", "store"]) == 2
    said = capsys.readouterr().err
    assert "store is not a run: it is a store of weights\n  hint: etude weights fsck store\n" in said
    assert main(["fsck", "c0"]) == 2
    assert "c0 is not a run: it has no run.json" in capsys.readouterr().err


def test_a_publish_without_savings_prints_no_factor(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    capsys.readouterr()
    main(["weights", "publish", "c0", "store"])
    assert capsys.readouterr().out.splitlines()[0].endswith(", nothing changed")
    Path("small").mkdir()
    save_file({"q": torch.zeros(3, 3)}, "small/model.safetensors", {"format": "pt"})
    main(["weights", "publish", "small", "store", "--other-tensors"])
    assert "times smaller" not in capsys.readouterr().out
    main(["weights", "follow", "store", "--apply", "live", "--once"])
    assert "lists of" not in capsys.readouterr().out


def test_a_rollback_and_a_canary_are_pointers_that_followers_go_to(steps, capsys) -> None:
    for step in steps:
        main(["weights", "publish", step, "store"])
    assert main(["weights", "point", "store", "1", "--branch", "canary"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once", "--branch", "canary"]) == 0
    assert holds("live", "c1")
    assert main(["weights", "point", "store", "2"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c2")


def test_a_follower_with_a_public_key_believes_its_owner_alone(steps, capsys) -> None:
    assert main(["weights", "key", "private"]) == 0
    public = capsys.readouterr().out.split()[-1]
    assert Path("private").stat().st_mode & 0o777 == 0o600
    follow = ["weights", "follow", "store", "--apply", "live", "--once", "--public-key"]
    main(["weights", "publish", "c0", "store", "--key", "private"])
    assert main([*follow, public]) == 0
    assert holds("live", "c0")
    assert main([*follow, "0" * 64]) == 1
    assert main(["weights", "publish", "c1", "other"]) == 0
    follow[2] = "other"
    assert main([*follow, public]) == 1
    assert holds("live", "c0")


FOLLOW = "import sys; from etude.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_follower_that_is_killed_goes_on_from_a_proven_version(steps) -> None:
    main(["weights", "publish", "c0", "store"])
    argv = [sys.executable, "-c", FOLLOW, "weights", "follow", "store", "--apply", "live", "--poll", "0.01s"]
    for step in (1, 2, 3):
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        main(["weights", "publish", f"c{step}", "store"])
        if step == 2:
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
        assert child.wait(timeout=300) == -signal.SIGKILL
        with CheckpointFolder(Path("live")) as folder:
            folder.verify()
            assert folder.version is not None
            assert folder.version.step in (step - 1, step)
        assert holds("live", f"c{folder.version.step}")
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c3")


def test_a_relay_of_a_run_that_has_published_nothing_yet_says_so_and_serves_what_comes(steps, capsys) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    argv = [sys.executable, "-c", FOLLOW, "weights", "relay", "run/weights", "--listen", "127.0.0.1:0"]
    relay = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        url = relay.stdout.readline().split(" at ")[1].strip()
        assert "engines will wait for the first one" in relay.stdout.readline()
        assert main(["weights", "publish", "c0", "run/weights"]) == 0
        assert main(["weights", "follow", url, "--apply", "live", "--once"]) == 0
        assert holds("live", "c0")
    finally:
        relay.kill()
        relay.communicate()


def test_followers_of_a_region_share_a_cache_and_those_without_its_disk_a_relay(steps, capsys, monkeypatch) -> None:
    main(["weights", "publish", "c0", "store"])
    main(["weights", "publish", "c1", "store"])
    argv = [sys.executable, "-c", FOLLOW, "weights", "relay", "store", "--listen", "127.0.0.1:0", "--cache", "near"]
    relay = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        url = relay.stdout.readline().split(" at ")[1].strip()
        assert main(["weights", "follow", url, "--apply", "one", "--once"]) == 0
        for path in Path("store/objects").rglob("*-*"):
            path.rename(path.with_suffix(".gone"))  # from now on copies alone have them
        assert main(["weights", "follow", url, "--apply", "two", "--once"]) == 0
    finally:
        relay.kill()
        relay.communicate()
    assert main(["weights", "follow", "store", "--apply", "three", "--once", "--cache", "near"]) == 0
    assert all(holds(folder, "c1") for folder in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["relay", "store", "--listen", "0.0.0.0:0"], 2, "anybody could read the weights"),
        (["relay", "store", "--listen", "8800"], 2, "is not an address"),
        (["relay", "stroe", "--listen", "127.0.0.1:0"], 2, "no store at stroe: the folder does not exist"),
        (["follow", "http://u:p@host", "--apply", "live", "--once"], 2, "only a host and a port"),
        (["log", "ftp://x/y"], 2, "no kind of store has URLs that begin with 'ftp'"),
        (["log", "htp://x/y"], 2, "did you mean 'http'?"),
        (["diff", "nosuchA", "nosuchB"], 2, "no checkpoint at nosuchA"),
        (["diff", "1", "2"], 2, "no run in runs/"),
        (["log", "store", "--name", "Bad/Name"], 2, "channel name 'Bad/Name' is not allowed"),
        (["follow", "store", "--apply", "live", "--branch", "Bad/Name"], 2, "branch name 'Bad/Name' is not allowed"),
        (["follow", "stroe", "--apply", "live", "--once"], 2, "no store at stroe"),
        (["fsck", "stroe"], 2, "no store at stroe"),
        (["gc", "stroe"], 2, "no store at stroe"),
        (["log", "stroe"], 2, "stroe is not a run"),
        (["publish", "none", "store"], 2, "no checkpoint at none"),
        (["publish", "c0", "store", "--name", "A/b"], 2, "channel name 'A/b' is not allowed"),
        (["publish", "c0", "store", "--key", "none"], 2, "none cannot be read"),
        (["publish", "c0", "store", "--key", "c0/model.safetensors"], 2, "does not contain a key"),
        (["key", "c0/model.safetensors"], 2, "exists"),
        (["key", "no/where"], 2, "no/where cannot be written"),
    ],
)
def test_missing_stores_and_invalid_addresses_are_named_and_nothing_is_created(steps, capsys, argv, code, says) -> None:
    assert main(["weights", *argv]) == code
    said = capsys.readouterr().err
    assert says in said
    assert "\n  hint: " in said
    assert not Path("stroe").exists()


def test_times_are_written_with_their_unit(capsys) -> None:
    assert [duration(text) for text in ("90s", "1.5m", "24h", "7d")] == [90.0, 90.0, 86_400.0, 604_800.0]
    with pytest.raises(SystemExit):
        main(["weights", "gc", "store", "--keep", "7"])
    assert "is not a duration: write 90s" in capsys.readouterr().err


def test_a_signed_channel_is_moved_with_its_key_alone(steps, capsys) -> None:
    main(["weights", "key", "private"])
    public = capsys.readouterr().out.split()[-1]
    main(["weights", "key", "other"])
    publish = ["weights", "publish", "c1", "store"]
    main(["weights", "publish", "c0", "store", "--key", "private"])
    capsys.readouterr()
    for move in (publish, ["weights", "point", "store", "0"]):
        assert main(move) == 1
        assert "is signed: it names v000000-" in capsys.readouterr().err
    for move in (publish, ["weights", "point", "store", "0"], ["weights", "gc", "store"]):
        assert main([*move, "--key", "other"]) == 1
        said = capsys.readouterr().err
        assert "is signed with another key" in said
        assert "private key" in said
    assert main([*publish, "--key", "private"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once", "--public-key", public]) == 0
    assert holds("live", "c1")


@pytest.mark.parametrize("torn", [None, b"garbage"])
def test_a_signed_channel_that_lost_its_pointer_is_not_made_an_unsigned_one(steps, capsys, torn) -> None:
    main(["weights", "key", "private"])
    public = capsys.readouterr().out.split()[-1]
    for step in steps[:3]:
        main(["weights", "publish", step, "store", "--key", "private"])
    pointer = Path("store/pointers/policy")
    pointer.unlink() if torn is None else pointer.write_bytes(torn)
    capsys.readouterr()
    assert main(["weights", "repair", "store"]) == 1
    said = capsys.readouterr().err
    assert "channel 'policy' is signed, and its pointer is missing or damaged" in said
    assert "of 3 versions in the store 3 are signed" in said
    assert "hint: give the signer's private key: --key FILE" in said
    assert (pointer.read_bytes() if pointer.exists() else None) == torn
    assert main(["weights", "repair", "store", "--key", "private"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once", "--public-key", public]) == 0
    assert holds("live", "c1")


def test_garbage_collection_of_a_signed_channel_says_that_it_needs_the_key(steps, capsys) -> None:
    main(["weights", "key", "private"])
    main(["weights", "publish", "c0", "store", "--key", "private"])
    capsys.readouterr()
    assert main(["weights", "gc", "store"]) == 0
    assert "give its private key: --key FILE" in capsys.readouterr().out
    assert main(["weights", "gc", "store", "--key", "private"]) == 0
    assert "--key" not in capsys.readouterr().out


def test_a_stores_damaged_pointer_is_repaired_and_every_command_says_how(steps, capsys) -> None:
    for step in steps[:3]:
        main(["weights", "publish", step, "store"])
    Path("store/pointers/policy").write_bytes(b"garbage")
    capsys.readouterr()
    for command in (["publish", "c3", "store"], ["log", "store"], ["gc", "store"], ["fsck", "store"]):
        assert main(["weights", *command]) == 1
        assert "`etude weights repair RUN|STORE`" in capsys.readouterr().err
    assert main(["weights", "repair", "store"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the pointer is set to v000001-")
    assert "v000002-" in said.splitlines()[1]
    assert main(["weights", "point", "store", "2"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c2")
    assert main(["weights", "repair", "store"]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_where_the_pointer_is_lost_nothing_is_published_collected_or_followed(steps, capsys) -> None:
    for step in steps[:3]:
        main(["weights", "publish", step, "store"])
    main(["weights", "follow", "store", "--apply", "live", "--once"])
    before = sorted(Path("store").rglob("*"))
    Path("store/pointers/policy").unlink()
    follow = ["follow", "store", "--apply"]
    for command in (
        ["publish", "c3", "store"],
        ["gc", "store"],
        [*follow, "live", "--once"],
        [*follow, "new", "--once"],
    ):
        capsys.readouterr()
        assert main(["weights", *command]) == 1
        said = capsys.readouterr().err
        assert "the pointer of 'policy' is missing" in said
        assert "etude weights repair" in said
    argv = [sys.executable, "-c", FOLLOW, "weights", *follow, "new"]
    assert subprocess.run(argv, capture_output=True, timeout=300, check=False).returncode == 1, (
        "it does not wait for ever"
    )
    assert len([*Path("store").rglob("*")]) == len(before) - 1
    assert not Path("new").exists()
    Path("store/pointers").rmdir()
    assert main(["weights", "repair", "store"]) == 0
    assert main(["weights", "publish", "c3", "store"]) == 0


def test_a_rollback_can_be_undone(steps, capsys) -> None:
    for step in steps[:3]:
        main(["weights", "publish", step, "store"])
    newest = capsys.readouterr().out.splitlines()[-1].split(":")[0]
    assert main(["weights", "point", "store", "0"]) == 0
    assert "until `etude weights gc` deletes them" in capsys.readouterr().out
    for text, checkpoint in (("2", "c2"), ("0", "c0"), (newest, "c2")):
        assert main(["weights", "point", "store", text]) == 0
        assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
        assert holds("live", checkpoint)


def test_a_step_not_above_the_newest_and_an_ambiguous_version_are_refused(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    main(["weights", "publish", "c1", "store", "--step", "5"])
    for step in ("5", "0"):
        assert main(["weights", "publish", "c2", "store", "--step", step]) == 2
        assert (
            f"--step {step} is not above the step of the newest version: the newest version is v000005-"
            in capsys.readouterr().err
        )
    with pytest.raises(SystemExit) as left:
        main(["weights", "publish", "c2", "store", "--step", "-3"])
    assert left.value.code == 2
    assert "'-3' is not a step" in capsys.readouterr().err
    for checkpoint in ("c2", "c3"):  # each a version ahead of the rolled back head, of the same step
        main(["weights", "point", "store", "0"])
        main(["weights", "publish", checkpoint, "store"])
    main(["weights", "point", "store", "0"])
    assert [path.name[:7] for path in sorted(Path("store/manifests/policy").iterdir())].count("v000001") == 2
    capsys.readouterr()
    assert main(["weights", "point", "store", "1"]) == 2
    said = capsys.readouterr().err
    assert "give the full name" in said
    names = [name.strip(",") for name in said.split() if name.startswith("v000001-")]
    assert len(names) == 2
    assert main(["weights", "point", "store", names[0]]) == 0


@pytest.mark.parametrize("argv", [["point", "store", "17"], ["diff", "0", "99", "store"]])
def test_a_version_that_is_not_there_is_bad_input(steps, capsys, argv) -> None:
    main(["weights", "publish", "c0", "store"])
    assert main(["weights", *argv]) == 2
    said = capsys.readouterr().err
    assert f"no version '{'17' if '17' in argv else '99'}' in channel 'policy'" in said
    assert "v000000-" in said


def test_a_branch_that_is_not_there_is_named_beside_those_that_are(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    main(["weights", "point", "store", "0", "--branch", "canary"])
    assert main(["weights", "follow", "store", "--apply", "live", "--once", "--branch", "canery"]) == 2
    said = capsys.readouterr().err
    assert "no branch 'canery': its branches: canary" in said
    assert not Path("live").exists()


def test_the_only_version_is_found_again_behind_a_damaged_pointer(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    Path("store/pointers/policy").write_bytes(b"garbage")
    assert main(["weights", "repair", "store"]) == 0
    assert main(["weights", "follow", "store", "--apply", "live", "--once"]) == 0
    assert holds("live", "c0")


def test_a_follower_waits_for_a_damaged_pointer_to_be_mended(steps) -> None:
    main(["weights", "publish", "c0", "store"])
    whole = Path("store/pointers/policy").read_bytes()
    Path("store/pointers/policy").write_bytes(b"garbage")
    argv = [sys.executable, "-c", FOLLOW, "weights", "follow", "store", "--apply", "live", "--poll", "0.01s"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("waiting: pointer is damaged")
        assert "hint" in child.stdout.readline()
        Path("whole").write_bytes(whole)
        Path("whole").rename("store/pointers/policy")  # at once: half of it would be another trouble
        assert child.stdout.readline().startswith("v000000-")
    finally:
        child.kill()
        child.communicate()
    assert holds("live", "c0")


def test_a_follower_does_not_wait_over_a_directory_of_another_model(steps) -> None:
    assert main(["weights", "publish", "c0", "store"]) == 0
    Path("other").mkdir()
    save_file({"layers.0.w": torch.zeros(3)}, "other/model.safetensors")
    before = Path("other/model.safetensors").read_bytes()
    command = [sys.executable, "-m", "etude.cli", "weights", "follow", "store", "--apply", "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "other has another checkpoint than channel 'policy'" in done.stderr
    assert Path("other/model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "argv",
    [
        ["log", "noread/s"],
        ["repair", "noread/s"],
        ["diff", "1", "2", "noread/s"],
        ["diff", "noread/c", "c0"],
        ["encode", "noread/c", "c0", "-o", "delta"],
        ["publish", "noread/c", "store"],
    ],
)
def test_a_directory_that_cannot_be_searched_is_an_error_of_three_parts(steps, capsys, monkeypatch, argv) -> None:
    real = os.stat

    def stat(path, *args, **kwargs):
        if str(path).startswith("noread/"):  # as a kernel says it to whoever is not root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    assert main(["weights", *argv]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: noread/")
    assert "cannot be used: Permission denied\n  hint: give the user that runs this command access" in said
    assert not Path("store").exists()


def test_no_store_is_made_inside_a_checkpoint(steps, capsys) -> None:
    for place in ("c0", f"file://{Path('c0').absolute()}"):
        before = sorted(Path().rglob("*"))
        assert main(["weights", "publish", "c1", place]) == 2
        said = capsys.readouterr().err
        assert f"{place} is a checkpoint, not a store" in said
        assert "etude weights publish CHECKPOINT STORE" in said
        assert sorted(Path().rglob("*")) == before


def test_what_a_lost_pointer_of_a_signed_channel_needs_is_its_key(steps, capsys) -> None:
    for key in ("private", "other"):
        main(["weights", "key", key])
    for step in steps[:3]:
        main(["weights", "publish", step, "store", "--key", "private"])
    Path("store/pointers/policy").unlink()
    capsys.readouterr()
    for command in (["publish", "c3", "store"], ["point", "store", "1"], ["gc", "store"]):
        assert main(["weights", *command]) == 1
        said = capsys.readouterr().err
        assert "the pointer of 'policy' is missing" in said
        assert "`etude weights repair RUN|STORE --key FILE`" in said
        assert main(["weights", *command, "--key", "other"]) == 1
        said = capsys.readouterr().err
        assert "is signed with another key" in said
        assert "--key FILE" in said


def test_a_follower_says_once_that_the_pointer_is_gone(steps, capsys, monkeypatch) -> None:
    for step in steps[:2]:
        main(["weights", "publish", step, "store"])
    pointer = Path("store/pointers/policy")
    whole = pointer.read_bytes()

    class Pause:
        """Between two polls: the pointer is lost after the first, and there again after the fourth."""

        polls = 0

        def wait(self, seconds: float) -> None:
            self.polls += 1
            if self.polls in (1, 6):
                pointer.unlink()
            elif self.polls == 4:
                pointer.write_bytes(whole)
            elif self.polls == 8:
                raise KeyboardInterrupt

    monkeypatch.setattr(weights_store, "threading", SimpleNamespace(Event=Pause))
    capsys.readouterr()
    assert main(["weights", "follow", "store", "--apply", "live"]) == 130
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("v000001-")
    assert [line.startswith("waiting: the pointer of 'policy' is missing") for line in said[1:]] == [True, False] * 2


@pytest.mark.parametrize("argv", [["repair", "store"], ["point", "store", "0"], ["diff", "0", "0", "store"]])
def test_a_misspelt_channel_is_told_from_an_empty_one(steps, capsys, argv) -> None:
    main(["weights", "publish", "c0", "store"])
    assert main(["weights", *argv, "--name", "polcy"]) == 2
    said = capsys.readouterr().err
    assert "there is no channel 'polcy'" in said
    assert "did you mean 'policy'?" in said


def test_objects_that_garbage_collection_deleted_are_gone(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    for stray in ("one", "two"):
        Path(f"store/objects/policy/{stray}").write_bytes(b"of a publish that was killed")
    assert main(["weights", "gc", "store", "--keep", "0s"]) == 0
    assert "0 keys deleted" in (said := capsys.readouterr().out)
    assert "2 keys belong to no version yet" in said
    assert main(["weights", "gc", "store", "--keep", "0s"]) == 0
    assert "2 keys deleted" in (said := capsys.readouterr().out)
    assert "0 keys belong to no version yet" in said


@pytest.mark.parametrize(("command", "reads"), [("publish", False), ("gc", False), ("point", False), ("follow", True)])
def test_help_offers_a_relay_where_it_is_enough_to_read(capsys, command, reads) -> None:
    with pytest.raises(SystemExit):
        main(["weights", command, "--help"])
    assert ("http://" in capsys.readouterr().out) == reads


@pytest.mark.parametrize("command", ["fsck", "gc", "point", "follow", "relay", "publish"])
def test_a_folder_with_other_files_is_refused_as_a_store_and_not_written_to(steps, capsys, command) -> None:
    Path("library").mkdir()
    Path("library/libfoo.so").write_bytes(b"x")
    more = {
        "point": ["0"],
        "follow": ["--apply", "live", "--once"],
        "relay": ["--listen", "127.0.0.1:0"],
    }.get(command, [])
    checkpoint = ["c0"] if command == "publish" else []
    assert main(["weights", command, *checkpoint, "library", *more]) == 2
    assert "library is not a store: it has files, but none of pointers/" in capsys.readouterr().err
    assert [path.name for path in Path("library").iterdir()] == ["libfoo.so"]


def test_a_run_is_checked_and_followed_by_its_folder_by_its_name_and_as_the_newest(steps, capsys) -> None:
    run = RunFolder.create(Path("runs/first"), config_toml="seed = 1", seed=1)
    for command in (["fsck"], ["fsck", "runs/first"], ["gc", "runs/first"], ["fsck", "runs/first/weights"]):
        assert main(["weights", *command]) != 0
        assert not (run / "weights").exists(), "a check makes nothing"
    capsys.readouterr()
    for step in steps[:2]:
        main(["weights", "publish", step, "runs/first/weights"])
    for named in ([], ["runs/first"], ["first"], ["runs/first/weights"]):
        before = sorted(Path("runs").rglob("*"))
        capsys.readouterr()
        assert main(["weights", "fsck", *named]) == 0
        assert capsys.readouterr().out.startswith("2 versions, ")
        assert sorted(Path("runs").rglob("*")) == before
    assert main(["weights", "gc", "first"]) == 0
    assert "2 versions can be rebuilt" in capsys.readouterr().out
    assert main(["weights", "follow", "runs/first", "--apply", "live", "--once"]) == 0
    assert holds("live", "c1")
    next(path for path in Path("runs/first/weights/objects").rglob("*") if path.is_file()).unlink()
    assert main(["weights", "fsck", "first"]) == 1


def test_a_check_writes_nothing_into_a_store_that_nobody_may_write(steps, capsys) -> None:
    main(["weights", "publish", "c0", "store"])
    stray = Path("store/.tmp/1-left")
    stray.write_bytes(b"half")
    os.utime(stray, (0, 0))
    for command in (["fsck", "store"], ["log", "store"], ["diff", "0", "0", "store"]):
        assert main(["weights", *command]) == 0
    assert stray.exists(), "what a killed writer left is swept by writers alone"
