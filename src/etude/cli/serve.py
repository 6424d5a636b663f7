"""The commands ``etude serve`` and ``export``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etude.cli.locations import existing_path, newest_run, open_run
from etude.cli.releases import CHANNEL, refuse_other_releases
from etude.config import load
from etude.errors import InputError, WeightsError, nearest
from etude.gateway import GatewayConfig, Keys
from etude.harvest.config import LendConfig
from etude.inference.config import EngineKind
from etude.numerics.config import ComputeDtype, Quantise
from etude.releases.pointers import CANARY, STABLE, branch_version
from etude.releases.router import ReleaseRouter
from etude.scratch import ScratchDirectory
from etude.seams import AnswerRecorder, FeedbackReceiver
from etude.stores import open_store
from etude.weights.chain.branches import list_branches
from etude.weights.chain.history import pointer_key
from etude.weights.chain.inspect import find

if TYPE_CHECKING:
    from etude.loop.serving import ModelSource


def serve(args: argparse.Namespace) -> int:
    """Serve checkpoints and runs over HTTP until interrupted. Returns the exit code.

    ``RUN@30`` is the version of step 30. ``RUN@NAME`` is the version of a branch, which is followed when it moves. A
    run alone is the version of its branch `stable`, or, without this branch or with `--newest`, the newest version.
    With `--releases` the branches `stable` and `canary` are served; with `--fleet` the version of its engines."""
    from etude.loop import event_loop
    from etude.loop.serving import parts_of, require_servable

    named = [_named_model(text) for text in args.models]
    models = dict(named)
    if len(models) < len(named):
        [(name, _)] = Counter(name for name, _ in named).most_common(1)
        hint = "give them names: etude serve one=runs/a/x two=runs/b/x"
        raise InputError(f"two models have the same name: {name}", hint=hint)
    if not models:
        newest = newest_run().path
        models = {newest.resolve().name: (newest, "")}
    kind = EngineKind(args.engine)
    sources = [parts_of(path, name, kind) for name, (path, _) in models.items()]
    _refuse_together(sources, [version for _, version in models.values()], args)
    for source in sources:
        require_servable(source, captured=args.capture is not None)
    lend = load(args.lend, LendConfig) if args.lend is not None else None
    gateway = GatewayConfig(
        host=args.host,
        port=args.port,
        max_running=args.max_concurrent,
        cors_origins=tuple(args.cors),
        summaries=not args.no_summaries,
    )
    if args.key is not None and not args.key.strip():
        raise InputError(
            "--key is empty",
            "without a key everyone could send requests",
            hint="set the variable of the shell that should have the key, or remove --key to serve without one",
        )
    key = args.key or os.environ.get("ETUDE_API_KEY")
    if args.keys and key:
        raise InputError(
            "--keys and --key cannot be used together",
            "the file of --keys has all keys",
            hint="add the key to the file of --keys",
        )
    keys = Keys.read(args.keys) if args.keys else Keys.of(key) if key else None
    for option, folder in (("--capture", args.capture), ("--feedback", args.feedback and args.feedback.parent)):
        if folder is not None:
            _make_folder(option, folder)
    recorder = None
    if args.capture is not None:
        from etude.privacy import CaptureWriter

        recorder = CaptureWriter(args.capture, keep_days=args.capture_days)
    feedback = None
    try:
        if args.feedback is not None:
            from etude.signals import FeedbackWriter

            feedback = FeedbackWriter(
                args.feedback, privacy=args.capture, keep_days=args.feedback_days, cap=args.feedback_cap
            )
        with contextlib.suppress(asyncio.CancelledError), ScratchDirectory("served-versions") as exported:
            event_loop.run(_serve(models, sources, exported, gateway, keys, recorder, feedback, lend, args))
    finally:
        for name, one in (("capture", recorder), ("feedback", feedback)):
            if one is not None:
                one.close()
                counts = ", ".join(f"{number} {what}" for what, number in one.counts().items())
                print(f"{name}: {counts}", file=sys.stderr)
    return 0


def _named_model(text: str) -> tuple[str, tuple[Path, str]]:
    """Parse ``[NAME=]PATH[@VERSION]`` into the name, and the path and version ("" if none is given).

    Without a name, it is the last part of the path, with the version."""
    name, given, place = text.partition("=")
    if not given or Path(text).exists():
        name, place = "", text
    elif not name or not place:
        missing = "path" if name else "name"
        hint = "write NAME=PATH, or PATH alone; a variable of the shell may be empty"
        raise InputError(f"{text!r} is not a model", f"it has no {missing}", hint=hint)
    path, version = place, ""
    if not Path(place).exists() and "@" in place:
        path, _, version = place.rpartition("@")
        if not path or not version:
            hint = "write RUN@STEP or RUN@BRANCH, or RUN alone; a variable of the shell may be empty"
            raise InputError(f"{text!r} is not a model", f"it has no {'version' if path else 'run'}", hint=hint)
    found = existing_path(Path(path))
    try:
        pointer_key(CHANNEL, version)
    except WeightsError as error:
        hint = f"after @ comes a step or a branch; {error.hint}"
        raise InputError(f"{text!r} is not a model", error.what, hint=hint) from None
    return name or found.resolve().name + f"@{version}" * bool(version), (found, version)


def _make_folder(option: str, folder: Path) -> None:
    """Create the folder of an option if it is missing. Raises `InputError` unless files can be created in it."""
    reason = "it is not writable"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
    raise InputError(f"{option} cannot use the folder {folder}", reason, hint="give a folder that you can write to")


async def _serve(
    models: dict[str, tuple[Path, str]],
    sources: Sequence[ModelSource],
    exported: Path,
    gateway: GatewayConfig,
    keys: Keys | None,
    recorder: AnswerRecorder | None,
    feedback: FeedbackReceiver | None,
    lend: LendConfig | None,
    args: argparse.Namespace,
) -> None:
    from etude.loop.serving import (
        forever,
        lender_of,
        model_of_checkpoint,
        model_of_fleet,
        require_signed,
        serve,
    )

    fleet: str | None = args.fleet
    public_key: bytes | None = args.public_key
    work = asyncio.current_task()
    assert work is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, work.cancel)
    router, lines = None, tuple[str, ...]()
    if args.releases is not None:
        sources = _versions(sources, fleet)
        if not args.releases.is_file():
            raise InputError(
                f"there is no file of releases at {args.releases}",
                hint="start the endless loop, which creates it (etude learn RUN --releases FILE); or begin a release:"
                " etude release begin RUN VERSION --settings FILE; or serve without --releases",
            )
        refuse_other_releases(args.releases, str(sources[0].store))
        router = ReleaseRouter(args.releases, stable=sources[0].name, canary=sources[1].name)
    elif not fleet:
        found = [
            _version(source, path, version, exported) if version else _stable(source, newest=args.newest)
            for source, (path, version) in zip(sources, models.values(), strict=True)
        ]
        sources, lines = zip(*found, strict=True)
    if public_key is not None:
        for source in sources:
            require_signed(source, public_key)
    report = partial(print, file=sys.stderr)
    opened = [
        model_of_fleet(source, registry=fleet, gateway=gateway)
        if fleet
        else model_of_checkpoint(
            source,
            public_key=public_key,
            gateway=gateway,
            log=report,
            lender=lender_of(source, lend, report) if lend is not None and source is sources[0] else None,
        )
        for source in sources
    ]
    _print_log()
    async with serve(opened, gateway=gateway, keys=keys, recorder=recorder, router=router, feedback=feedback) as url:
        with_key = "with" if keys else "without"
        print(f"serving {', '.join(models)} at {url} ({with_key} a key); stop with Ctrl-C", flush=True)
        for name, place in (("capture", args.capture), ("feedback", args.feedback), ("releases", args.releases)):
            if place is not None:
                print(f"  {name}: {place}", flush=True)
        for line in filter(None, lines):
            print(f"  {line}", flush=True)
        await forever()


def _refuse_together(sources: Sequence[ModelSource], versions: Sequence[str], args: argparse.Namespace) -> None:
    """Raise `InputError` for options that cannot be used together, or not with these models."""
    fleet: str | None = args.fleet
    if any(versions) and (fleet or args.newest or args.releases is not None):
        raise InputError(
            f"a version (@{next(filter(None, versions))}) cannot be used with --fleet, --newest or --releases",
            "these say which version is served",
            hint="remove the version or the option",
        )
    if fleet and args.engine != EngineKind.REFERENCE:
        raise InputError(
            f"--engine {args.engine} cannot be used with --fleet",
            "the engines of a fleet run already",
            hint="remove --engine; fleet.engines of the run says which engines it starts",
        )
    if fleet and len(sources) > 1:
        raise InputError(
            "--fleet cannot serve several models",
            "all engines of a fleet serve one model",
            hint="start one gateway for each",
        )
    if args.public_key is not None and (fleet or any(source.store is None for source in sources)):
        raise InputError(
            "--public-key needs the weights of a run",
            "the engines of a fleet have their own" if fleet else "a checkpoint has no signature",
            hint="remove --public-key",
        )
    if args.public_key is not None and (steps := [version for version in versions if version.isdecimal()]):
        raise InputError(
            f"--public-key cannot be used with a step (@{steps[0]})",
            "branches and the newest version are signed, steps are not",
            hint="point a branch at the version and serve it (RUN@BRANCH), or remove --public-key",
        )
    if args.lend is not None and (fleet or len(sources) > 1 or sources[0].store is None or any(versions)):
        raise InputError(
            "--lend needs one run with published weights",
            "its engines load newer versions while they are lent",
            hint="give one run, without --fleet and without a version",
        )
    if args.lend is not None and args.engine != EngineKind.REFERENCE:
        raise InputError(
            f"--lend cannot be used with --engine {args.engine}",
            "only reference engines keep the tokens of rollouts when they are taken back",
            hint="remove --engine or --lend",
        )
    if args.newest and (fleet or args.releases is not None):
        raise InputError(
            f"--newest cannot be used with {'--fleet' if fleet else '--releases'}",
            "the engines of a fleet serve the newest version" if fleet else "the releases decide which versions serve",
            hint="remove --newest",
        )


def _versions(sources: Sequence[ModelSource], fleet: str | None) -> list[ModelSource]:
    """Return the models for `--releases`: the branches `stable` and `canary` of one run, each for its own engine.

    Raises `InputError` unless `sources` is one run with published weights, without `fleet`."""
    if len(sources) != 1 or fleet or sources[0].store is None:
        raise InputError(
            "--releases needs one run with published weights",
            "its branches stable and canary are served",
            hint="give one run, without --fleet",
        )
    [source] = sources
    return [source._replace(branch=STABLE), source._replace(name=f"{source.name}-canary", branch=CANARY)]


def _stable(source: ModelSource, *, newest: bool) -> tuple[ModelSource, str]:
    """Return a model to serve with the branch `stable` of its run, if it has one, and a line that says which version
    is served; "" for a model without such a branch. `newest`: serve the newest version in any case."""
    if source.store is None:
        return source, ""
    store = open_store(str(source.store), readonly=True)
    stable, last = (branch_version(store, CHANNEL, branch) for branch in (STABLE, ""))
    if stable is None:
        return source, ""
    if newest:
        return source, f"{source.name}: the newest version, {last}; the stable version is {stable}"
    line = f"{source.name}: the stable version, {stable}"
    if last != stable:
        line += f"; the newest is {last} (--newest serves it, --releases FILE serves a canary to its users)"
    return source._replace(branch=STABLE), line


def _version(source: ModelSource, path: Path, version: str, exported: Path) -> tuple[ModelSource, str]:
    """Return the model that serves a step ("30") or a branch of a run, and a line that says which version it is.

    The weights of a step are written into `exported` as a checkpoint. Raises `InputError` for a checkpoint, which has
    no versions, and for an unknown branch, and `NoVersion` for an unknown step."""
    from etude.loop.export import export_version

    if source.store is None:
        hint = f"serve it without @{version}; only runs that have published weights have versions"
        raise InputError(f"{path} has no version {version!r}", "it has no published weights", hint=hint)
    store = open_store(str(source.store), readonly=True)
    if version.isdecimal():
        found, out = find(store, version).version, exported / f"{len(list(exported.iterdir()))}"
        dtype = "bf16" if source.engine.dtype is ComputeDtype.BFLOAT16 else "f32"
        export_version(open_run(path), int(version), out, dtype=dtype, log=partial(print, file=sys.stderr))
        return source._replace(checkpoint=out, store=None, version=found), f"{source.name}: {found}"
    named = branch_version(store, CHANNEL, version)
    if named is None:
        known = sorted(list_branches(store, CHANNEL))
        facts = f"it has {', '.join(known)}" if known else "it has no branches"
        hint = f"create it: etude weights point {path} VERSION --branch {version}; or serve {path}@STEP"
        hint = nearest(version, known) if known else hint
        raise InputError(f"{path} has no branch {version!r}", facts, hint=hint)
    return source._replace(branch=version), f"{source.name}: the branch {version}, now {named}"


def _print_log() -> None:
    """Print one line on each request to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("etude.gateway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint, the result of a run, or one of its published versions as a Hugging Face directory. Returns
    0."""
    from etude.loop.export import export_adapter, export_checkpoint, export_version, export_version_adapter

    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise InputError(f"{args.out} is not an empty directory", hint="give a new directory")
    if args.adapter and args.quantise != "none":
        raise InputError(
            "--adapter and --quantise cannot be used together",
            "an adapter cannot be quantised",
            hint="remove one of them",
        )
    path, at, step = args.source.rpartition("@")
    settings = {"dtype": args.dtype, "quantise": Quantise(args.quantise), "log": partial(print, file=sys.stderr)}
    if at:
        if not step.isdigit():
            raise InputError(
                f"{step!r} is not a step",
                "after @ comes the step of the version, a number",
                hint="write RUN@30; etude weights log lists the versions",
            )
        run = open_run(Path(path))
        adapter = args.adapter and export_version_adapter(run, int(step), args.out)
        print(adapter or export_version(run, int(step), args.out, **settings))
    else:
        source = existing_path(Path(args.source))
        print(export_adapter(source, args.out) if args.adapter else export_checkpoint(source, args.out, **settings))
    return 0
