"""``etude weights publish | follow | point | gc | fsck | key``: channels in any store, without a run."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from etude.cli.places import RUNS, open_run
from etude.cli.watched import Watched
from etude.dashboard.formatting import number, size
from etude.errors import EtudeError, InputError, StoreError, WeightsError
from etude.loop.locations import weights_location, weights_store
from etude.records.completion import Version
from etude.records.sample import Published
from etude.run import RunFolder
from etude.seams import BlobStore
from etude.stores import BucketStore, open_store
from etude.stores.http import HttpStore
from etude.weights import Channel, Follower
from etude.weights.chain import branches, fsck, garbage, history, inspect, signing
from etude.weights.chain.manifest import Damaged
from etude.weights.files.checkpoint import INDEX, read_checkpoint
from etude.weights.files.folder import CheckpointFolder
from etude.weights.files.folder_follower import AdoptedVersion, FolderFollower, differences
from etude.weights.follow.parts import full_specs
from etude.weights.tensors import Tensor


def publish(args: argparse.Namespace) -> int:
    """Publish a checkpoint as the channel's next version: a delta against its head, where there is one."""
    tensors = read_checkpoint(args.checkpoint).tensors
    _refuse_checkpoint(args.store)
    signer = signing.read_signer(args.key)
    if "://" not in args.store and Path(args.store).is_dir():
        _directory(Path(args.store))
    store = open_store(args.store)
    head = Follower(store, args.name).head_version()
    if head is None:
        inspect.require_pointer(store, args.name, signer)
    elif args.step is not None and args.step <= head.step:
        raise InputError(
            f"--step {args.step} is not above the head's", f"it is {head}", hint=f"{head.step + 1} is the next"
        )
    if head is not None and not args.other_tensors:
        _refuse_others(store, args, tensors)
    step = args.step if args.step is not None else head.step + 1 if head else 0
    done = Channel(store, args.name, signer=signer).publish(tensors, step=step, parent=head, rollout_ids=[], owned=True)
    print(
        f"{done.version}: {size(done.object_bytes)}{_ratio(done, head) if head else ''}"
        + (f"; beside it an anchor of {size(done.anchor_bytes)}" if head and done.anchor else "")
    )
    return 0


def _ratio(done: Published, head: Version) -> str:
    """How many times less than the weights a delta is; "" where it is not less."""
    if done.version.digest == head.digest:
        return ", nothing changed"
    ratio = done.snapshot_bytes / max(1, done.object_bytes)
    return f", {ratio:,.1f} times less than the weights" if ratio >= 1.05 else ""


def _refuse_others(store: BlobStore, args: argparse.Namespace, tensors: Mapping[str, Tensor]) -> None:
    """Raises `InputError` where a checkpoint has not the head's tensors: every follower would get another model."""
    pointer = history.head(store, args.name)
    if pointer is None:
        return
    try:
        manifest = history.load(store, pointer.head)
    except WeightsError:  # there is nothing to compare with, and a publish heals it
        return
    held = {name: tensor.spec for name, tensor in tensors.items()}
    published = {entry.name: entry.spec for entry in manifest.tensors}
    if held != published and (facts := differences(full_specs(held), full_specs(published))):
        raise InputError(
            f"{args.checkpoint} holds another checkpoint than channel {args.name!r} of {args.store}",
            facts,
            hint="name the checkpoint that is meant, or another channel: --name; if the channel's model is to change,"
            " --other-tensors",
        )


def _refuse_checkpoint(place: str) -> None:
    """Raises `InputError` where a first publish would make a store inside a checkpoint."""
    scheme, is_url, _ = place.partition("://")
    if is_url and scheme != "file":
        return
    root = Path(unquote(place.removeprefix("file://").removeprefix("localhost"))) if is_url else Path(place)
    if not is_store(str(root)) and ((root / INDEX).is_file() or any(root.glob("*.safetensors"))):
        raise InputError(
            f"{place} is a checkpoint, and no store",
            "a store would be made inside it",
            hint="the checkpoint comes first: etude weights publish CHECKPOINT STORE",
        )


def follow(args: argparse.Namespace) -> int:
    """Keep a checkpoint directory at the head; a line for each version. Ends by Ctrl-C; with `--once` at the head."""
    store, trouble = watched_store(args.store, sys.stdout, cache=args.cache), ""
    try:
        _require_head(store, args)
    except (_NoVersionYet, StoreError, Damaged) as error:  # all of these pass by themselves
        if args.once:
            raise
        trouble = _waiting(error, trouble)
    with CheckpointFolder(args.apply) as folder:
        follower = FolderFollower(store, folder, args.name, branch=args.branch, public_key=args.public_key)
        if follower.resumed:
            print(f"{folder.version}: held by {args.apply}, proven", flush=True)
        damaged = ", ".join(str(args.apply / name) for name in follower.damaged)
        if damaged:
            print(f"{folder.version}: damaged, or changed by something else: {damaged}; repaired next", flush=True)
        pause = threading.Event()
        while True:
            try:
                adopted = follower.advance()
                if adopted is not None:
                    print(_line(adopted) + (f"; repaired: {damaged}" if damaged else ""), flush=True)
                    trouble = damaged = ""
                elif folder.version is not None:
                    _require_head(store, args)
                    trouble = ""
            except EtudeError as error:
                if args.once or isinstance(error, InputError):  # waiting mends no wrong directory
                    raise
                trouble = _waiting(error, trouble)
            if args.once:
                return 0
            pause.wait(args.poll)


def _waiting(error: EtudeError, said: str) -> str:
    """Say what is waited for, unless it was said last."""
    if str(error) != said:
        print(f"waiting: {error}", flush=True)
    return str(error)


class _NoVersionYet(WeightsError):
    """A channel before its first publish."""


def _require_head(store: BlobStore, args: argparse.Namespace) -> None:
    """Raises `WeightsError` where there is nothing to follow: no such branch, a pointer that is gone, no version."""
    if history.head(store, args.name, args.branch, public_key=args.public_key) is not None:
        return
    if args.branch:
        there = ", ".join(sorted(branches.list_branches(store, args.name)))
        raise InputError(
            f"channel {args.name!r} of {args.store} has no branch {args.branch!r}",
            f"its branches: {there}" if there else "it has none",
            hint="etude weights point STORE VERSION --branch NAME makes one",
        )
    inspect.require_pointer(store, args.name)
    raise _NoVersionYet(f"channel {args.name!r} of {args.store} has no version", hint="etude weights publish makes one")


def relay(args: argparse.Namespace) -> int:
    """Serve a store's bytes to machines that share no disk, over HTTP, until Ctrl-C. What it fetched it keeps."""
    import uvicorn

    from etude.stores.relay import build_relay

    host, _, number = args.listen.rpartition(":")
    token = os.environ.get("ETUDE_TOKEN") or None
    if not host or not number.isdigit() or int(number) > 65535:
        raise InputError(f"--listen {args.listen} is no address", hint="write HOST:PORT, 127.0.0.1:8800 for instance")
    if token is None and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise InputError(f"a relay on {host} without a token", "anybody could read the weights", hint="set ETUDE_TOKEN")
    app = build_relay(existing_store(args.store, cache=args.cache), token=token)
    try:
        listener = socket.create_server(
            (host.strip("[]"), int(number)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise InputError(f"cannot listen on {args.listen}", str(error.strerror), hint="take another port") from None
    print(f"relaying {args.store} at http://{host}:{listener.getsockname()[1]}", flush=True)
    if "://" not in args.store and not (Path(_directory(Path(args.store))) / "pointers").is_dir():
        print("nothing is published there yet: engines wait for the first version", flush=True)
    config = uvicorn.Config(app, access_log=False, log_level="warning", server_header=False, limit_concurrency=1024)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def gc(args: argparse.Namespace) -> int:
    """Delete what no version needs that was a head within `--keep`. The first call only looks."""
    signer = signing.read_signer(args.key)
    store = _with_channel(args)
    inspect.require_pointer(store, args.name, signer)
    done = garbage.collect(store, args.name, keep_s=args.keep, now=time.time(), signer=signer)
    print(
        f"{done.num_deleted} keys deleted; {done.num_kept} versions can be rebuilt, of {done.num_old} older ones only"
        f" the manifest is left; {done.num_unreachable} keys belong to nothing yet"
    )
    if done.needs_key:
        print("the channel is signed: deleting what killed publishes left needs the key that signs: --key FILE")
    return 0


def _with_channel(args: argparse.Namespace) -> BlobStore:
    """The store, to be written, once a look at it has shown the channel. Raises `InputError`."""
    inspect.require_channel(existing_store(args.store, readonly=True), args.name)
    return existing_store(args.store)


def point(args: argparse.Namespace) -> int:
    """Let a branch, or the channel itself, name a version that is stored: a canary, a rollback."""
    signer = signing.read_signer(args.key)
    store = _with_channel(args)
    inspect.require_pointer(store, args.name, signer)
    version = inspect.find(store, args.version, args.name).version
    branches.point(store, args.name, version, branch=args.branch, signer=signer)
    print(
        f"{args.name}{'/' + args.branch if args.branch else ''} names {version}; its followers go there by themselves"
    )
    print("what no pointer leads to now can be pointed at again, by step or name, until `etude weights gc` takes it")
    return 0


def key(args: argparse.Namespace) -> int:
    """Draw a private key into a file that only its owner reads, and say the public one."""
    try:
        file = os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{args.file} exists", hint="a key is not overwritten: name another file") from None
    except OSError as error:
        raise InputError(f"{args.file} cannot be written", str(error.strerror), hint="name another file") from None
    private = signing.new_key()
    with os.fdopen(file, "w") as out:
        out.write(private.hex() + "\n")
    print(f"public key: {signing.Signer(private).public_key.hex()}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Read all of a channel and rebuild every version by every way. Exit code 1 for a version that is lost."""
    place = str(open_run(None).path) if args.store is None else args.store
    store = watched_store(place, sys.stderr, readonly=True)
    inspect.require_channel(store, args.name)
    found = fsck.verify(store, args.name)
    tell(found)
    if found.found:
        first = found.found[0]
        raise WeightsError(f"{number(len(found.found), 'problem')} in {place}", told(found), hint=first.hint)
    return 0


def told(found: fsck.Check) -> str:
    """The first problem, and which versions have one."""
    return "; ".join(filter(None, (str(found.found[0]), found.affected)))


def tell(found: fsck.Check) -> None:
    """Print what a check found, one finding per line, and how much it read."""
    for finding in found.found:
        print(finding)
    for finding in found.notices:
        print(f"notice: {finding}")
    print(
        f"{number(found.num_versions, 'version')}, {number(found.num_objects, 'object')}, {found.object_bytes:,} bytes:"
        f" {number(len(found.found), 'problem')}, {number(len(found.notices), 'notice')},"
        f" {number(len(found.orphans), 'orphan')}"
        + (f"; of {found.num_collected} versions garbage collection took the objects" if found.num_collected else "")
    )


def named_store(text: str | None, *, readonly: bool = True) -> BlobStore:
    """The store that a RUN|STORE argument means: a URL, a store's directory, or a run's weights."""
    if text is not None and is_store(text):
        return watched_store(text, sys.stderr, readonly=readonly)
    return weights_store(open_run(None if text is None else Path(text)), readonly=readonly)


def is_store(text: str | None) -> bool:
    """Whether a RUN|STORE argument means a store: a URL, or a directory with pointers or manifests."""
    return text is not None and ("://" in text or any((Path(text) / folder).is_dir() for folder in _FOLDERS))


_FOLDERS = ("pointers", "branches", "manifests")


def existing_store(place: str, *, cache: Path | None = None, readonly: bool = False) -> BlobStore:
    """The store at a URL, in a directory, or of a run (a run's may have no version yet). A mistyped path is not made
    into an empty store, nor a directory of something else. Raises `InputError`."""
    if "://" not in place:
        if (run := _run_of(Path(place))) is not None and cache is None:
            return weights_store(run, readonly=readonly)
        place = _directory(Path(place))
    return open_store(place, cache=cache, readonly=readonly)


def _directory(path: Path) -> str:
    """Where the store is that a path means: there, or where the run there keeps its weights."""
    hint = "give a run, its weights (RUN/weights), a store's directory, s3://bucket/prefix, gs:// or az://"
    if (run := _run_of(path)) is not None:
        return str(weights_location(run))
    if not path.is_dir():
        raise InputError(f"no store at {path}", "nor a run whose weights it would hold", hint=hint)
    if not is_store(str(path)) and any(found.name not in _OWN for found in path.iterdir()):
        raise InputError(
            f"{path} is no store", f"it has files, and none of {', '.join(f'{name}/' for name in _FOLDERS)}", hint=hint
        )
    return str(path)


def _run_of(path: Path) -> RunFolder | None:
    """The run that a path means: its folder, its name in runs/, or its weights' folder."""
    for folder in (path, RUNS / path, *([path.parent] if path.name == "weights" else [])):
        if (folder / "run.json").is_file():
            return RunFolder(folder) if folder == path.parent else RunFolder.open(folder)
    return None


_OWN = (".tmp", ".lock", "objects", "later")
"""What an empty store's directory, or one whose first publish was killed, may hold."""


def watched_store(place: str, out: TextIO, *, cache: Path | None = None, readonly: bool = False) -> BlobStore:
    """An existing store; a line in `out` while it does not answer, where it is one that is asked again."""
    far = existing_store(place, readonly=readonly)
    store = far if cache is None else existing_store(place, cache=cache, readonly=readonly)
    if not isinstance(far, HttpStore | BucketStore):
        return store
    return Watched(store, place, far.deadline_s, partial(print, file=out, flush=True))


def _line(adopted: AdoptedVersion) -> str:
    return (
        f"{adopted.version}: fetched {size(adopted.fetched_bytes)} in {adopted.fetch_s:.2f} s, wrote"
        f" {size(adopted.written_bytes)} in {adopted.write_s:.2f} s"
        + (f", lists of changes: {size(adopted.list_bytes)} of memory" if adopted.list_bytes else "")
        + (f"; healed: {'; '.join(adopted.healed)}" if adopted.healed else "")
    )
