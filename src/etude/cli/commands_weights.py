"""The arguments of ``etude weights``. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import (
    Commands,
    Parser,
    add,
    add_channel,
    branch,
    duration,
    group,
    place,
    public_key,
    step,
)

_READABLE = "a directory, s3://bucket/prefix, gs://, az:// or http://"
_WRITABLE = "a directory, s3://bucket/prefix, gs:// or az://"


def add_weights_commands(commands: Commands[Parser]) -> None:
    """Add ``etude weights`` and its commands."""
    weights = group(commands, "weights", "publish, follow, compare and verify versions of weights")
    log = add(
        weights, "log", "weights:log", "list every version: bytes, compression ratio, nearness to the smallest size"
    )
    log.add_argument(
        "run", nargs="?", type=place, metavar="RUN|STORE", help="a run or a store (default: the newest in runs/)"
    )
    add_channel(log)
    diff = add(weights, "diff", "weights:diff", "show the changes between two checkpoints or versions, by tensor")
    diff.add_argument("a", metavar="A", help="a checkpoint directory, a .safetensors file, or a version or its step")
    diff.add_argument("b", metavar="B", help="another one of the same kind")
    diff.add_argument(
        "run", nargs="?", type=place, metavar="RUN|STORE", help="where the versions are (default: the newest in runs/)"
    )
    add_channel(diff)
    diff.add_argument("--plot", type=Path, metavar="OUT.html", help="write a page with plots (checkpoints)")
    diff.add_argument("--all", action="store_true", help="show all tensors, not only the largest (checkpoints)")
    encode = add(weights, "encode", "weights_files:encode", "write the delta file from checkpoint A to checkpoint B")
    encode.add_argument("a", type=Path, metavar="A", help="the base checkpoint")
    encode.add_argument("b", type=Path, metavar="B", help="the target checkpoint")
    encode.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the delta file to write")
    for parser in (diff, encode):
        parser.add_argument(
            "--mode", choices=["best", "fast"], default="best", help="smallest delta, or fastest (default: %(default)s)"
        )
    apply = add(weights, "apply", "weights_files:apply", "apply a delta file to checkpoint A, and write the result")
    apply.add_argument("a", type=Path, metavar="A", help="the base checkpoint")
    apply.add_argument("delta", type=Path, metavar="FILE", help="the delta file")
    apply.add_argument("-o", "--out", type=Path, required=True, metavar="DIRECTORY", help="the checkpoint to write")
    verify = add(weights, "verify", "weights:verify", "verify every digest of a run's versions, or of a delta file")
    verify.add_argument(
        "run", nargs="?", type=Path, metavar="RUN|FILE", help="a run or a delta file (default: the newest in runs/)"
    )
    verify.add_argument("--base", type=Path, metavar="A", help="the base checkpoint of a delta FILE")
    repair = add(weights, "repair", "weights:repair", "set a lost or damaged pointer to the newest published version")
    repair.add_argument("run", nargs="?", metavar="RUN|STORE", help="a run or a store (default: the newest in runs/)")
    add_channel(repair)
    repair.add_argument("--key", type=Path, metavar="FILE", help="the private key, if the channel is signed")
    _add_store_commands(weights)


def _add_store_commands(weights: Commands[Parser]) -> None:
    publish = add(weights, "publish", "weights_store:publish", "publish a checkpoint as the next version of a channel")
    publish.add_argument("checkpoint", type=Path, metavar="DIR", help="a checkpoint directory, or a .safetensors file")
    publish.add_argument(
        "--step", type=step, metavar="N", help="step of the version (default: one more than the newest version's)"
    )
    publish.add_argument(
        "--other-tensors",
        action="store_true",
        help="accept tensors with other names, dtypes or shapes than the newest version's",
    )
    follow = add(weights, "follow", "weights_store:follow", "keep a checkpoint directory at the newest version")
    gc = add(weights, "gc", "weights_store:gc", "delete objects that no version needs; the first call deletes nothing")
    gc.add_argument(
        "--keep",
        type=duration,
        default="7d",
        metavar="TIME",
        help="keep versions that were the newest within this time (default: %(default)s)",
    )
    fsck = add(
        weights, "fsck", "weights_store:check", "read a whole channel, and check that every version can be rebuilt"
    )
    point = add(
        weights, "point", "weights_store:point", "point a branch or the channel at a version, e.g. to roll back"
    )
    relay = add(weights, "relay", "weights_store:relay", "serve a store over HTTP, read-only, to other hosts")
    relay.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="address; set $ETUDE_TOKEN if other hosts can reach it"
    )
    for parser in (publish, follow, relay, gc, fsck, point):
        parser.add_argument(
            "store",
            type=place,
            nargs="?" if parser is fsck else None,
            metavar="STORE" if parser is publish else "RUN|STORE",
            help={fsck: f"a run, {_READABLE} (default: the newest in runs/)", publish: _WRITABLE}.get(
                parser, f"a run, {_WRITABLE if parser in (gc, point) else _READABLE}"
            ),
        )
    for parser in (publish, follow, gc, fsck, point):
        add_channel(parser)
    follow.add_argument(
        "--apply", type=Path, required=True, metavar="DIR", help="the checkpoint directory; created if missing"
    )
    point.add_argument("version", metavar="VERSION", help="v000003, 3, or a longer part of its name")
    for parser in (follow, point):
        parser.add_argument(
            "--branch", type=branch, default="", metavar="NAME", help="a branch, e.g. canary (default: the channel)"
        )
    for parser in (publish, gc, point):
        parser.add_argument(
            "--key", type=Path, metavar="FILE", help="the private key that signs the channel's pointers"
        )
    follow.add_argument(
        "--public-key", type=public_key, metavar="HEX", help="accept only versions signed with the matching private key"
    )
    follow.add_argument(
        "--poll", type=duration, default="1s", metavar="TIME", help="how often to check (default: %(default)s)"
    )
    follow.add_argument("--once", action="store_true", help="update to the newest version and exit")
    for parser in (follow, relay):
        parser.add_argument("--cache", type=Path, metavar="DIR", help="download cache, shared by a region")

    key = add(weights, "key", "weights:key", "create a private key for signing, and print its public key")
    key.add_argument("file", type=Path, metavar="FILE", help="the file for the private key")
