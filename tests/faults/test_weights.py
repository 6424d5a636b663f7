"""Weights under faults: readers see the old version or the new one, whole, or an error that says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from etude.errors import StoreError, WeightsError
from etude.records import Version
from etude.stores import DirectoryStore, MemoryStore
from etude.weights import Channel, Follower, Manifest, Tensor, chain, lineage
from etude.weights.chain.history import head, pointer_key, readable, stored
from etude.weights.chain.inspect import repair, verify
from etude.weights.chain.manifest import FORMAT, Pointer, Ref, read_manifest, read_pointer
from etude.weights.delta import codec
from etude.weights.shards.part_follower import PartFollower
from etude.weights.tensors import same_bits

SIZE = 3000
STEPS = ("objects", "manifest", "pointer")


def policy_at(step: int) -> dict[str, Tensor]:
    codes = np.random.default_rng(0).integers(0x3C00, 0x3E00, SIZE).astype(np.uint16)
    for s in range(1, step + 1):
        codes = codes + (np.random.default_rng([1, s]).random(SIZE) < 0.05).astype(np.uint16)
    return {
        "a": Tensor("bf16", (SIZE // 2,), codes[: SIZE // 2]),
        "b": Tensor("bf16", (SIZE // 2,), codes[SIZE // 2 :]),
    }


def publish_steps(store: MemoryStore | DirectoryStore, steps: range) -> list[Version]:
    writer = Channel(store)
    versions: list[Version] = []
    for step in steps:
        parent = versions[-1] if versions else None
        versions.append(writer.publish(policy_at(step), step=step, parent=parent, rollout_ids=[]).version)
    return versions


def holds(follower: Follower, step: int) -> bool:
    return all(same_bits(follower.tensors[name], tensor) for name, tensor in policy_at(step).items())


def replace(store: MemoryStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.put(key, data)


def delta_keys(store: MemoryStore) -> dict[int, str]:
    return {m.version.step: m.delta.objects[0].key for m in chain(store, "policy") if m.delta}


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "lost": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_follower_heals_from_an_anchor_when_its_delta_is_damaged(damage: str) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    parent = None
    for step in range(40):
        parent = writer.publish(policy_at(step), step=step, parent=parent, rollout_ids=[]).version
        manifest = chain(store, "policy")[-1]
        if step == 0:
            follower.advance()
        elif manifest.anchor is not None:
            break
    assert manifest.delta is not None
    assert follower.version is not None
    key = manifest.delta.objects[0].key
    data = DAMAGE[damage](store.get(key))
    store.delete(key)
    if data is not None:
        store.put(key, data)
    update = follower.advance()
    assert update is not None
    assert update.version == manifest.version
    assert holds(follower, manifest.version.step)


@pytest.mark.parametrize("damage", DAMAGE)
def test_where_no_way_is_left_the_error_names_it_and_the_old_version_stays(damage: str) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version
    follower.advance()
    second = writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[]).version
    key = delta_keys(store)[1]
    data = DAMAGE[damage](store.get(key))
    store.delete(key)
    if data is not None:
        store.put(key, data)
    with pytest.raises(WeightsError, match="cannot build v000001") as caught:
        follower.advance()
    assert key in caught.value.facts
    assert "etude weights fsck" in caught.value.hint
    assert follower.version == first
    assert holds(follower, 0)
    repaired = Channel(store).publish(policy_at(2), step=2, parent=second, rollout_ids=[])
    assert repaired.anchor
    assert follower.advance() is not None
    assert holds(follower, 2)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["manifest", "pointer"])
def test_a_damaged_manifest_or_pointer_is_an_error_and_the_old_version_stays(kind: str, damage: str) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version
    follower.advance()
    writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[])
    pointer = head(store, "policy")
    assert pointer is not None
    key = pointer.head.key if kind == "manifest" else pointer_key("policy")
    data = DAMAGE[damage](store.get(key))
    store.delete(key)
    if data is None and kind == "pointer":
        assert follower.advance() is None
    else:
        if data is not None:
            store.put(key, data)
        with pytest.raises(WeightsError):
            follower.advance()
    assert follower.version == first
    assert holds(follower, 0)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pointer_is_replaced_by_the_next_publish_of_a_new_writer_or_of_the_same(damage: str) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    versions = [writer.publish(policy_at(0), step=0, parent=None, rollout_ids=["a"]).version]
    versions.append(writer.publish(policy_at(1), step=1, parent=versions[0], rollout_ids=["b"]).version)
    for step, successor in ((2, writer), (3, Channel(store))):
        data = DAMAGE[damage](store.get(pointer_key("policy")))
        store.delete(pointer_key("policy"))
        if data is not None:
            store.compare_and_swap(pointer_key("policy"), None, data)
        published = successor.publish(policy_at(step), step=step, parent=versions[-1], rollout_ids=[str(step)])
        versions.append(published.version)
        assert "pointer" in successor.repair_note
        follower.advance()
        assert follower.version == published.version
        assert holds(follower, step)
    assert [manifest.version for manifest in lineage(store, "policy")] == versions
    assert verify(store).problems == ()


def test_a_pointer_of_another_format_is_somebodys_and_is_left_alone() -> None:
    store = MemoryStore()
    publish_steps(store, range(2))
    theirs = store.get("pointers/policy").replace(b'"format":2', b'"format":3')
    replace(store, "pointers/policy", theirs)
    with pytest.raises(WeightsError, match="format 3"):
        Channel(store).publish(policy_at(2), step=2, parent=None, rollout_ids=[])
    with pytest.raises(WeightsError, match="format 3"):
        repair(store)
    assert store.get("pointers/policy") == theirs


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_damaged_manifest_keeps_nobody_from_training_on_and_its_lineage_says_where_it_ends(
    step: int, damage: str
) -> None:
    store = MemoryStore()
    versions = publish_steps(store, range(3))
    ref = {m.version.step: r for r, m in stored(store, "policy")}[step]
    whole = store.get(ref.key)
    data = DAMAGE[damage](whole)
    store.delete(ref.key)
    if data is not None:
        store.put(ref.key, data)
    published = Channel(store).publish(policy_at(3), step=3, parent=versions[-1], rollout_ids=["new"])
    known, broken = readable(store, "policy")
    assert [m.version.step for m in known] == list(range(step + 1, 4))
    assert broken == ref
    follower = Follower(store)
    follower.advance()
    assert follower.version == published.version
    assert holds(follower, 3)
    replace(store, ref.key, whole)
    assert [m.version for m in lineage(store, "policy")] == [*versions, published.version]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_pointer_without_a_writer_is_repaired_to_what_was_surely_committed_and_never_to_more(damage: str) -> None:
    store = MemoryStore()
    versions = publish_steps(store, range(3))
    good = store.get("pointers/policy")
    with pytest.raises(Killed):
        Channel(store).publish(policy_at(3), step=3, parent=versions[-1], rollout_ids=[], after=_die_before_commit)
    for told, newest in (([str(v) for v in versions], 2), ((), 2)):  # the killed publish itself names version 2
        data = DAMAGE[damage](good)
        store.delete("pointers/policy")
        if data is not None:
            store.compare_and_swap("pointers/policy", None, data)
        assert repair(store, published=told) == versions[newest]
        pointer = head(store, "policy")
        assert pointer is not None
        assert (pointer.head, pointer.generation) == (read_pointer(good).head, 1)
        assert repair(store) is None


def test_without_a_witness_the_head_itself_is_not_believed_and_the_version_before_it_is_taken() -> None:
    store = MemoryStore()
    versions = publish_steps(store, range(3))
    store.delete("pointers/policy")
    assert repair(store) == versions[1]
    follower = Follower(store)
    follower.advance()
    assert holds(follower, 1)


def _die_before_commit(done: str) -> None:
    if done == "manifest":
        raise Killed


def test_a_forged_delta_with_matching_checksums_cannot_give_other_tensors() -> None:
    store = MemoryStore()
    publish_steps(store, range(2))
    base = Follower(store)
    good_head = head(store, "policy")
    assert good_head is not None
    manifest = read_manifest(store.get(good_head.head.key))
    assert manifest.delta is not None
    good = store.get(manifest.delta.objects[0].key)
    chance = random.Random(3)
    outcomes = set()
    for _ in range(300):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= chance.randrange(1, 256)
        forged = _with_delta(store, manifest, bytes(bad))
        base = Follower(forged)
        try:
            base.advance()
        except WeightsError:
            outcomes.add("error")
        else:
            assert holds(base, 1)
            outcomes.add("right")
    assert "error" in outcomes


def _with_delta(store: MemoryStore, manifest: Manifest, data: bytes) -> MemoryStore:
    """A store whose head's delta is `data`, every reference and checksum fixed up; the target's digests stay."""
    forged = MemoryStore()
    for key in store.list(""):
        if not key.startswith("pointers/"):
            forged.put(key, store.get(key))
    digest = hashlib.sha256(data).hexdigest()
    forged.put(f"objects/forged-{digest}", data)
    way = manifest.ways[0]
    item = msgspec.structs.replace(way.objects[0], key=f"objects/forged-{digest}", num_bytes=len(data), sha256=digest)
    _point_at(forged, msgspec.structs.replace(manifest, ways=(msgspec.structs.replace(way, objects=(item,)),)))
    return forged


class Ranged(MemoryStore):
    """A store that writes down which ranges of objects it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int | None]] = []

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key.startswith("objects/"):
            self.asked.append((key, start, stop))
        return super().get(key, start, stop)


def test_a_forged_header_with_matching_page_digests_is_refused_by_a_reader_of_a_part() -> None:
    """It is a delta that a writer could have made: only the manifest knows that it is another one."""
    store = Ranged()
    first = publish_steps(store, range(1))[0]
    follower = PartFollower(store, {"b"}.__contains__)
    follower.advance()
    before = follower.tensors["b"].codes.copy()
    published = Channel(store).publish(policy_at(1), step=1, parent=first, rollout_ids=[])
    (item,) = chain(store, "policy")[-1].ways[0].objects
    other, base = policy_at(2), policy_at(0)
    forged = codec.encode([other["a"], other["b"]], [base["a"], base["b"]])
    replace(store, item.key, forged)
    store.asked.clear()
    with pytest.raises(WeightsError, match="cannot build the wanted part of v000001") as caught:
        follower.advance()
    assert f"the header of an object of {published.version} is not what was published" in caught.value.facts
    assert item.key in caught.value.facts
    assert {asked for asked in store.asked if asked[0] == item.key} == {(item.key, 0, item.header_bytes)}, "no page"
    assert follower.version == first
    assert np.array_equal(follower.tensors["b"].codes, before)


def test_a_check_names_an_object_that_is_whole_where_its_manifest_says_another_header() -> None:
    store = MemoryStore()
    publish_steps(store, range(2))
    manifest = chain(store, "policy")[-1]
    way = manifest.ways[0]
    item = msgspec.structs.replace(way.objects[0], header_sha256="0" * 64)
    _point_at(store, msgspec.structs.replace(manifest, ways=(msgspec.structs.replace(way, objects=(item,)),)))
    follower = Follower(store)
    assert follower.advance() is not None
    assert holds(follower, 1)
    (finding,) = verify(store).found
    assert (finding.version, finding.facts) == (manifest.version, item.key)
    assert "readers of a part of it refuse it" in finding.hint
    with pytest.raises(WeightsError, match="header"):
        PartFollower(store, {"b"}.__contains__).advance()


def _point_at(store: MemoryStore, manifest: Manifest) -> None:
    """Let the pointer name a manifest, whatever it says."""
    body = msgspec.json.encode(manifest)
    ref = Ref(manifest.version, "manifests/policy/forged.json", hashlib.sha256(body).hexdigest())
    store.put(ref.key, body)
    pointer = Pointer(format=FORMAT, head=ref, nonce=manifest.nonce)
    old = store.get("pointers/policy") if "pointers/policy" in store.list("pointers/") else None
    assert store.compare_and_swap("pointers/policy", old, msgspec.json.encode(pointer))


def test_a_mutated_manifest_whose_checksum_fits_gives_an_error_or_the_right_tensors() -> None:
    store = MemoryStore()
    publish_steps(store, range(2))
    pointer = head(store, "policy")
    assert pointer is not None
    good = store.get(pointer.head.key)
    chance = random.Random(5)
    for number in range(500):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] = chance.choice(b'09afz"{}[],:-.e \x00\xff')
        key = f"manifests/policy/mutated-{number}.json"
        store.put(key, bytes(bad))
        ref = Ref(pointer.head.version, key, hashlib.sha256(bad).hexdigest())
        moved = msgspec.json.encode(Pointer(format=FORMAT, head=ref, nonce=pointer.nonce))
        assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), moved)
        follower = Follower(store)
        try:
            follower.advance()
        except (WeightsError, StoreError):
            continue
        assert holds(follower, 1)


def test_a_pointer_or_manifest_of_another_format_names_the_cure() -> None:
    store = MemoryStore()
    publish_steps(store, range(1))
    pointer = json.loads(store.get("pointers/policy"))
    manifest = json.loads(store.get(pointer["head"]["key"]))
    manifest["format"] = 1
    for item in (item for way in manifest["ways"] for item in way["objects"]):
        del item["header_bytes"], item["header_sha256"]  # format 1 had no such fields: it is no damage
    with pytest.raises(WeightsError, match="manifest has format 1") as caught:
        read_manifest(json.dumps(manifest).encode())
    assert "the version of etude that wrote it" in caught.value.hint
    pointer["format"] = 3
    replace(store, "pointers/policy", json.dumps(pointer).encode())
    with pytest.raises(WeightsError, match="format 3") as caught:
        Follower(store).advance()
    assert "the version of etude that wrote it" in caught.value.hint


class Killed(BaseException):
    """What no handler of the channel may catch."""


@pytest.mark.parametrize("at", STEPS)
def test_a_publish_that_dies_between_its_steps_shows_readers_the_old_version_or_the_new(at: str) -> None:
    store = MemoryStore()
    versions = publish_steps(store, range(2))
    follower = Follower(store)
    follower.advance()

    def die(step: str) -> None:
        if step == at:
            raise Killed

    dying = Channel(store)
    with pytest.raises(Killed):
        dying.publish(policy_at(2), step=2, parent=versions[-1], rollout_ids=["g000002.0"], after=die)
    follower.advance()
    assert follower.version is not None
    assert follower.version.step == (2 if at == "pointer" else 1)
    assert holds(follower, follower.version.step)
    again = Channel(store).publish(policy_at(3), step=3, parent=follower.version, rollout_ids=[])
    follower.advance()
    assert follower.version == again.version
    assert holds(follower, 3)
    check = verify(store)
    assert check.problems == ()
    assert len(check.orphans) == {"objects": 1, "manifest": 2, "pointer": 0}[at]


@pytest.mark.parametrize("at", STEPS)
def test_the_same_writer_may_publish_again_after_a_failed_try(at: str) -> None:
    store = MemoryStore()
    writer = Channel(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version

    def fail(step: str) -> None:
        if step == at:
            raise StoreError("the store went away", hint="wait")

    with pytest.raises(StoreError):
        writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[], after=fail)
    second = writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[]).version
    follower = Follower(store)
    follower.advance()
    assert follower.version == second
    assert holds(follower, 1)
    assert verify(store).problems == ()


KILLED_WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
import test_weights as shared
from etude.stores import DirectoryStore
from etude.weights import Channel, Follower
store, at = DirectoryStore(sys.argv[1]), sys.argv[2]
def die(done):
    if done == at:
        os.kill(os.getpid(), signal.SIGKILL)
parent = Follower(store).head_version()
step = parent.step + 1
Channel(store).publish(shared.policy_at(step), step=step, parent=parent, rollout_ids=[], after=die)
"""


@pytest.mark.parametrize("at", STEPS)
def test_a_writer_process_killed_between_its_steps_leaves_a_whole_store(at: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_steps(store, range(2))
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "store"), at, str(Path(__file__).parent)]
    killed = subprocess.run(command, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    follower = Follower(store)
    follower.advance()
    assert follower.version is not None
    assert follower.version.step == (2 if at == "pointer" else 1)
    assert holds(follower, follower.version.step)
    subprocess.run([*command[:4], "never", command[5]], check=True, timeout=300)
    follower.advance()
    assert follower.version.step == (3 if at == "pointer" else 2)
    assert holds(follower, follower.version.step)
    assert verify(store).problems == ()


def test_of_two_writers_the_second_to_commit_fails_and_changes_nothing() -> None:
    store = MemoryStore()
    versions = publish_steps(store, range(1))
    one, other = Channel(store), Channel(store)
    one.publish(policy_at(1), step=1, parent=versions[0], rollout_ids=[])
    inside: list[Version] = []

    def overtake(step: str) -> None:
        if step == "manifest":
            inside.append(one.publish(policy_at(2), step=2, parent=None, rollout_ids=[]).version)

    with pytest.raises(WeightsError, match="another writer moved") as caught:
        other.publish(policy_at(5), step=2, parent=versions[0], rollout_ids=[], after=overtake)
    assert "only one learner" in caught.value.hint
    with pytest.raises(WeightsError, match="another writer moved"):
        other.publish(policy_at(5), step=2, parent=versions[0], rollout_ids=[])
    follower = Follower(store)
    follower.advance()
    assert follower.version == inside[0]
    assert holds(follower, 2)


class LostAnswer(MemoryStore):
    """A store whose compare-and-swap does its work, or not, and then fails to say so."""

    def __init__(self, *, works: bool) -> None:
        super().__init__()
        self.works, self.broken = works, False

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        if not self.broken:
            return super().compare_and_swap(key, expected, data)
        if self.works:
            super().compare_and_swap(key, expected, data)
        raise StoreError("the answer did not come", hint="look again")


def test_a_commit_whose_answer_got_lost_is_found_by_its_nonce() -> None:
    store = LostAnswer(works=True)
    writer = Channel(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version
    store.broken = True
    second = writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[]).version
    assert Follower(store).head_version() == second


def test_a_commit_that_did_not_happen_is_the_stores_error_and_may_be_repeated() -> None:
    store = LostAnswer(works=False)
    writer = Channel(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version
    store.broken = True
    with pytest.raises(StoreError, match="did not come"):
        writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[])
    assert Follower(store).head_version() == first
    store.broken = False
    second = writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[]).version
    assert Follower(store).head_version() == second


class Silent(MemoryStore):
    """Says nothing after a compare-and-swap, for a while: not even what the pointer is."""

    def __init__(self, *, works: bool) -> None:
        super().__init__()
        self.works, self.broken, self.silent = works, False, False

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        if not self.broken:
            return super().compare_and_swap(key, expected, data)
        self.silent = True
        if self.works:
            super().compare_and_swap(key, expected, data)
        raise StoreError("the answer did not come", hint="look again")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.silent:
            raise StoreError("nobody answers", hint="look again")
        return super().get(key, start, stop)


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("works", [False, True])
def test_a_commit_of_which_nothing_is_known_is_looked_up_by_the_next_publish(works: bool, overtaken: bool) -> None:
    store = Silent(works=works)
    writer = Channel(store)
    first = writer.publish(policy_at(0), step=0, parent=None, rollout_ids=[]).version
    store.broken = True
    with pytest.raises(StoreError, match="not known"):
        writer.publish(policy_at(1), step=1, parent=first, rollout_ids=[])
    store.broken = store.silent = False
    if overtaken:
        Channel(store).publish(policy_at(7), step=7, parent=None, rollout_ids=[])
        with pytest.raises(WeightsError, match="another writer moved"):
            writer.publish(policy_at(2), step=2, parent=first, rollout_ids=[])
        return
    second = writer.publish(policy_at(2), step=2, parent=first, rollout_ids=[])
    assert not second.anchor
    follower = Follower(store)
    follower.advance()
    assert follower.version == second.version
    assert holds(follower, 2)
    assert [m.version.step for m in chain(store, "policy")] == ([0, 1, 2] if works else [0, 2])


FULL_DISK = """
import resource, sys
sys.path.insert(0, sys.argv[2])
import test_weights as shared
from etude.errors import StoreError
from etude.stores import DirectoryStore
from etude.weights import Channel, Follower
store = DirectoryStore(sys.argv[1])
parent = Follower(store).head_version()
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    Channel(store).publish(shared.policy_at(2), step=2, parent=parent, rollout_ids=[])
except StoreError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_is_an_error_with_a_hint_and_readers_keep_the_old_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    publish_steps(store, range(2))
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "store"), str(Path(__file__).parent)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "cannot be written" in ran.stdout
    assert "hint:" in ran.stdout
    follower = Follower(store)
    follower.advance()
    assert holds(follower, 1)
    assert verify(store).problems == ()
    assert list((tmp_path / "store" / ".tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_without_write_permission_is_an_error_with_a_hint(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    versions = publish_steps(store, range(1))
    (tmp_path / "store" / ".tmp").chmod(0o500)
    try:
        with pytest.raises(StoreError) as caught:
            Channel(store).publish(policy_at(1), step=1, parent=versions[0], rollout_ids=[])
        assert "write access" in caught.value.hint
    finally:
        (tmp_path / "store" / ".tmp").chmod(0o700)
