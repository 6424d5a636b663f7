"""The commands ``etude weights publish``, ``follow``, ``relay``, ``point``, ``gc``, ``fsck`` and ``key``.

They work with channels in any store, without a run. A channel is a series of versions of one model's weights."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from etude.cli.locations import open_run
from etude.cli.store_locations import existing_store, is_store, reporting_store, store_directory
from etude.dashboard.formatting import number, size
from etude.errors import EtudeError, InputError, StoreError, WeightsError
from etude.records.completion import Version
from etude.records.sample import Published
from etude.seams import BlobStore
from etude.stores import open_store
from etude.weights import Channel, Follower
from etude.weights.chain import branches, fsck, garbage, history, inspect, signing
from etude.weights.chain.manifest import Damaged
from etude.weights.files.checkpoint import INDEX, read_checkpoint
from etude.weights.files.folder import CheckpointFolder
from etude.weights.files.folder_follower import AdoptedVersion, FolderFollower, differences
from etude.weights.follow.parts import full_specs
from etude.weights.tensors import Tensor


def publish(args: argparse.Namespace) -> int:
    """Publish a checkpoint as the next version of a channel. Returns 0.

    It is stored as a delta against the newest version, if there is one."""
    tensors = read_checkpoint(args.checkpoint).tensors
    _require_no_checkpoint(args.store)
    signer = signing.read_signer(args.key)
    if "://" not in args.store and Path(args.store).is_dir():
        store_directory(Path(args.store))
    store = open_store(args.store)
    head = Follower(store, args.name).head_version()
    if head is None:
        inspect.require_pointer(store, args.name, signer)
    elif args.step is not None and args.step <= head.step:
        raise InputError(
            f"--step {args.step} is not above the step of the newest version",
            f"the newest version is {head}",
            hint=f"give --step {head.step + 1} or more, or leave it out",
        )
    if head is not None and not args.other_tensors:
        _require_same_tensors(store, args, tensors)
    step = args.step if args.step is not None else head.step + 1 if head else 0
    done = Channel(store, args.name, signer=signer).publish(tensors, step=step, parent=head, rollout_ids=[], owned=True)
    print(
        f"{done.version}: {size(done.object_bytes)}{_ratio(done, head) if head else ''}"
        + (f"; also an anchor of {size(done.anchor_bytes)}" if head and done.anchor else "")
    )
    return 0


def _ratio(done: Published, head: Version) -> str:
    """The compression ratio of a delta, as text; "" if it is not smaller than the weights."""
    if done.version.digest == head.digest:
        return ", nothing changed"
    ratio = done.snapshot_bytes / max(1, done.object_bytes)
    return f", {ratio:,.1f} times smaller than the weights" if ratio >= 1.05 else ""


def _require_same_tensors(store: BlobStore, args: argparse.Namespace, tensors: Mapping[str, Tensor]) -> None:
    """Raises `InputError` if the tensors of a checkpoint differ from the newest version's in name, dtype or shape:
    every follower would get another model."""
    pointer = history.head(store, args.name)
    if pointer is None:
        return
    try:
        manifest = history.load(store, pointer.head)
    except WeightsError:  # nothing to compare with; publishing repairs it
        return
    specs = {name: tensor.spec for name, tensor in tensors.items()}
    published = {entry.name: entry.spec for entry in manifest.tensors}
    if specs != published and (facts := differences(full_specs(specs), full_specs(published))):
        raise InputError(
            f"{args.checkpoint} has other tensors than channel {args.name!r} of {args.store}",
            facts,
            hint="check the checkpoint, or give another channel with --name; to change the model of the channel, add"
            " --other-tensors",
        )


def _require_no_checkpoint(location: str) -> None:
    """Raises `InputError` if a first publish would create a store inside a checkpoint directory."""
    scheme, is_url, _ = location.partition("://")
    if is_url and scheme != "file":
        return
    root = Path(unquote(location.removeprefix("file://").removeprefix("localhost"))) if is_url else Path(location)
    if not is_store(str(root)) and ((root / INDEX).is_file() or any(root.glob("*.safetensors"))):
        raise InputError(
            f"{location} is a checkpoint, not a store",
            "a store would be created inside it",
            hint="the checkpoint comes first: etude weights publish CHECKPOINT STORE",
        )


def follow(args: argparse.Namespace) -> int:
    """Keep a checkpoint directory at the newest version of a channel, and print a line for each version. Returns 0.

    Runs until Ctrl-C, or with `--once` until the newest version is applied."""
    store, problem = reporting_store(args.store, sys.stdout, cache=args.cache), ""
    try:
        _require_head(store, args)
    except (_NoVersionYet, StoreError, Damaged) as error:  # all of these may end without intervention
        if args.once:
            raise
        problem = _print_waiting(error, problem)
    with CheckpointFolder(args.apply) as folder:
        follower = FolderFollower(store, folder, args.name, branch=args.branch, public_key=args.public_key)
        if follower.resumed:
            print(f"{folder.version}: {args.apply} has it, verified", flush=True)
        damaged = ", ".join(str(args.apply / name) for name in follower.damaged)
        if damaged:
            print(f"{folder.version}: damaged, or changed by another program: {damaged}; will be repaired", flush=True)
        pause = threading.Event()
        while True:
            try:
                adopted = follower.advance()
                if adopted is not None:
                    print(_line(adopted) + (f"; repaired: {damaged}" if damaged else ""), flush=True)
                    problem = damaged = ""
                elif folder.version is not None:
                    _require_head(store, args)
                    problem = ""
            except EtudeError as error:
                if args.once or isinstance(error, InputError):  # waiting does not help with a wrong directory
                    raise
                problem = _print_waiting(error, problem)
            if args.once:
                return 0
            pause.wait(args.poll)


def _print_waiting(error: EtudeError, last: str) -> str:
    """Print why the command is waiting, unless the `last` message was the same. Returns the message."""
    if str(error) != last:
        print(f"waiting: {error}", flush=True)
    return str(error)


class _NoVersionYet(WeightsError):
    """A channel that has no version yet."""


def _require_head(store: BlobStore, args: argparse.Namespace) -> None:
    """Raises `WeightsError` if there is nothing to follow: no such branch, a lost pointer, or no version."""
    if history.head(store, args.name, args.branch, public_key=args.public_key) is not None:
        return
    if args.branch:
        known = ", ".join(sorted(branches.list_branches(store, args.name)))
        raise InputError(
            f"channel {args.name!r} of {args.store} has no branch {args.branch!r}",
            f"its branches: {known}" if known else "it has no branches",
            hint="to create it: etude weights point STORE VERSION --branch NAME",
        )
    inspect.require_pointer(store, args.name)
    raise _NoVersionYet(
        f"channel {args.name!r} of {args.store} has no version", hint="publish one: etude weights publish"
    )


def relay(args: argparse.Namespace) -> int:
    """Serve a store read-only over HTTP until Ctrl-C, and cache fetched objects. Returns the exit code."""
    import uvicorn

    from etude.stores.relay import build_relay

    host, _, number = args.listen.rpartition(":")
    token = os.environ.get("ETUDE_TOKEN") or None
    if not host or not number.isdigit() or int(number) > 65535:
        raise InputError(
            f"--listen {args.listen} is not an address", hint="write HOST:PORT, for example 127.0.0.1:8800"
        )
    if token is None and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise InputError(
            f"a relay on {host} needs a token",
            "without a token, anybody could read the weights",
            hint="set ETUDE_TOKEN",
        )
    app = build_relay(existing_store(args.store, cache=args.cache), token=token)
    try:
        listener = socket.create_server(
            (host.strip("[]"), int(number)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise InputError(f"cannot listen on {args.listen}", str(error.strerror), hint="use another port") from None
    print(f"relaying {args.store} at http://{host}:{listener.getsockname()[1]}", flush=True)
    if "://" not in args.store and not (Path(store_directory(Path(args.store))) / "pointers").is_dir():
        print("the store has no version yet: engines will wait for the first one", flush=True)
    config = uvicorn.Config(app, access_log=False, log_level="warning", server_header=False, limit_concurrency=1024)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def gc(args: argparse.Namespace) -> int:
    """Delete the objects of versions that stopped being the newest more than `--keep` ago. Returns 0.

    An object is kept while a kept version needs it. The first call deletes nothing: it only records what exists now."""
    signer = signing.read_signer(args.key)
    store = _with_channel(args)
    inspect.require_pointer(store, args.name, signer)
    done = garbage.collect(store, args.name, keep_s=args.keep, now=time.time(), signer=signer)
    print(
        f"{done.num_deleted} keys deleted; {done.num_kept} versions can be rebuilt; {done.num_old} older versions have"
        f" only their manifest left; {done.num_unreachable} keys belong to no version yet"
    )
    if done.needs_key:
        print("the channel is signed: to delete what interrupted publishes left, give its private key: --key FILE")
    return 0


def _with_channel(args: argparse.Namespace) -> BlobStore:
    """Open the store for writing, after checking that it has the channel. Raises `InputError`."""
    inspect.require_channel(existing_store(args.store, readonly=True), args.name)
    return existing_store(args.store)


def point(args: argparse.Namespace) -> int:
    """Point a branch, or the channel itself, at a stored version: for a canary or a rollback. Returns 0."""
    signer = signing.read_signer(args.key)
    store = _with_channel(args)
    inspect.require_pointer(store, args.name, signer)
    version = inspect.find(store, args.version, args.name).version
    branches.point(store, args.name, version, branch=args.branch, signer=signer)
    print(f"{args.name}{'/' + args.branch if args.branch else ''} points at {version}; its followers will switch to it")
    print("versions that no pointer reaches now can be pointed at again, until `etude weights gc` deletes them")
    return 0


def key(args: argparse.Namespace) -> int:
    """Write a new private key to a file that only its owner can read, and print the public key. Returns 0."""
    try:
        file = os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{args.file} exists", "keys are not overwritten", hint="give another file") from None
    except OSError as error:
        raise InputError(f"{args.file} cannot be written", str(error.strerror), hint="give another file") from None
    private = signing.new_key()
    with os.fdopen(file, "w") as out:
        out.write(private.hex() + "\n")
    print(f"public key: {signing.Signer(private).public_key.hex()}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Read a whole channel and rebuild every version in every possible way. Returns exit code 1 if there is a
    problem."""
    location = str(open_run(None).path) if args.store is None else args.store
    store = reporting_store(location, sys.stderr, readonly=True)
    inspect.require_channel(store, args.name)
    found = fsck.verify(store, args.name)
    print_check(found)
    if found.found:
        first = found.found[0]
        raise WeightsError(
            f"{number(len(found.found), 'problem')} in {location}", first_problem(found), hint=first.hint
        )
    return 0


def first_problem(found: fsck.Check) -> str:
    """Return the first problem of a check, with the affected versions, as text."""
    return "; ".join(filter(None, (str(found.found[0]), found.affected)))


def print_check(found: fsck.Check) -> None:
    """Print the findings of a check, one per line, and the number of objects and bytes that it read."""
    for finding in found.found:
        print(finding)
    for finding in found.notices:
        print(f"notice: {finding}")
    print(
        f"{number(found.num_versions, 'version')}, {number(found.num_objects, 'object')}, {found.object_bytes:,} bytes:"
        f" {number(len(found.found), 'problem')}, {number(len(found.notices), 'notice')},"
        f" {number(len(found.orphans), 'orphan')}"
        + (f"; the objects of {found.num_collected} versions were garbage-collected" if found.num_collected else "")
    )


def _line(adopted: AdoptedVersion) -> str:
    return (
        f"{adopted.version}: fetched {size(adopted.fetched_bytes)} in {adopted.fetch_s:.2f} s, wrote"
        f" {size(adopted.written_bytes)} in {adopted.write_s:.2f} s"
        + (f", lists of changes: {size(adopted.list_bytes)} of memory" if adopted.list_bytes else "")
        + (f"; earlier attempts failed: {'; '.join(adopted.healed)}" if adopted.healed else "")
    )
