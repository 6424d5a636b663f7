"""The command line `etude`: parses the arguments and calls the command's function, which lives in another folder.

Exit codes are those of `etude.errors.Exit`; every error class has one.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from etude import __version__
from etude.cli._interrupted import sigterm_interrupts  # first: the others take most of a second
from etude.cli.arguments import (
    LOCAL,
    Commands,
    Parser,
    add,
    branch,
    channel,
    cluster,
    duration,
    place,
    port,
    positive,
    public_key,
    step,
    within,
    written,
)
from etude.cli.machine_commands import accepts_unbounded, backend_and_jobs, machine_commands
from etude.errors import EXITS, EtudeError, Exit, InputError, StoreError

_DTYPES = ("float32", "bfloat16", "float16")
_READABLE = "a directory, s3://bucket/prefix, gs://, az:// or http://"
_WRITABLE = "a directory, s3://bucket/prefix, gs:// or az://"
_EXTRAS = {
    **dict.fromkeys(("torch", "tokenizers", "safetensors", "aiohttp", "uvloop", "pyarrow", "jinja2"), "train"),
    "obstore": "buckets",
    "cryptography": "signing",
    "psycopg": "postgres",
    "ray": "ray",
    "triton": "gpu",
}
"""Which extra brings a library that a light install lacks."""
_REFUSALS = {
    errno.EACCES: "give the user that runs this access there, or name another place",
    errno.EPERM: "give the user that runs this access there, or name another place",
    errno.EROFS: "the filesystem is mounted read-only: name another place",
    errno.ENAMETOOLONG: "no file has such a name: look at what was given",
    errno.ELOOP: "its symbolic links lead in a circle: name another place",
    errno.EIO: "look at the disk and its mount",
    errno.ESTALE: "look at the mount: what it had is gone",
}
"""What an operating system says of a path that a user named, and what to do about it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. SIGTERM ends it as Ctrl-C does."""
    with sigterm_interrupts():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    """Errors that have an explanation are printed in three parts, and so is a path that the operating system refuses;
    all others keep their traceback."""
    try:
        args = _parser().parse_args(argv)
        code = int(_command(args.command)(args) or 0)
        sys.stdout.flush()
        return code
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        lacking = InputError(
            f"this command needs {library}",
            "it is not installed: a light install has what weights and stores need",
            hint=f"pip install 'etude[{_EXTRAS[library]}]'",
        )
        print(f"error: {lacking}", file=sys.stderr)
        return lacking.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return Exit.FAILED
    except OSError as error:
        if error.filename is not None and error.errno in _REFUSALS:
            refusal = StoreError(
                f"{os.fsdecode(error.filename)} cannot be used", error.strerror or "", hint=_REFUSALS[error.errno]
            )
            print(f"error: {refusal}", file=sys.stderr)
            return refusal.exit_code
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere
        hint = "make room where the output goes, or where the command writes"
        print(f"error: not everything could be written\n  {error.strerror}\n  hint: {hint}", file=sys.stderr)
        return Exit.FAILED


def _command(name: str) -> Callable[[argparse.Namespace], int | None]:
    module, _, function = name.partition(":")
    found: Callable[[argparse.Namespace], int | None] = getattr(import_module(f"etude.cli.{module}"), function)
    return found


def _parser() -> argparse.ArgumentParser:
    exits = "exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in EXITS.items())
    parser = Parser(prog="etude", description="Turn an open MoE model into your product's specialist.", epilog=exits)
    parser.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_commands(commands)
    _plan_command(commands)
    _look_commands(commands)
    _task_commands(commands)
    machine_commands(commands)
    _engine_commands(commands)
    _weights_commands(commands)
    _model_commands(commands)
    _fleet_commands(commands)
    _plugin_commands(commands)
    return parser


def _plugin_commands(commands: Commands[Parser]) -> None:
    plugins = commands.add_parser("plugins", help="parts of your own package: list the kinds, check a class")
    named = plugins.add_subparsers(required=True, metavar="COMMAND")
    add(named, "list", "plugins:listed", "every kind of plug-in, the setting that names it, and what is built in")
    check = add(named, "check", "plugins:check", "run the contract suite on a class of yours")
    check.add_argument("path", metavar="my_package.module:Name")
    check.add_argument("--kind", metavar="KIND", help="as `etude plugins list` names it (default: found out)")
    check.add_argument(
        "--set", action="append", default=[], metavar="a=b", help="a setting of the plug-in (repeatable)"
    )


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run folder (default: the newest in runs/)")


def _plan_command(commands: Commands[Parser]) -> None:
    plan = add(commands, "plan", "plan:planned", "what a run would need and take: memory, time, money, what bounds it")
    plan.add_argument("config", type=Path, metavar="CONFIG", help="a config.toml, or a checkpoint directory")
    plan.add_argument("--set", action="append", default=[], metavar="a.b=value", help="override a setting")
    plan.add_argument("--hardware", default="cpu", metavar="NAME", help="cpu (this one, measured), h100, h200, b200")
    plan.add_argument("--learner-ranks", type=positive, metavar="N", help="(default: the config's)")
    plan.add_argument("--engines", type=positive, metavar="N", help="(default: the config's)")
    plan.add_argument("--engine-hardware", metavar="NAME", help="of the engines, where it is another kind")
    plan.add_argument(
        "--price", action="append", default=[], metavar="NAME=N", help="dollars an hour of a device, or of cpu"
    )
    region = "NAME:ENGINES:GBITS:MS"
    plan.add_argument("--region", action="append", default=[], metavar=region, help="a place of engines, and its line")
    plan.add_argument("--engine-ranks", type=positive, metavar="N", help="devices an engine (default: the config's)")
    a_share, tokens = within(0, 1), within(0, 1e9)
    for name, kind, help in (
        ("turns", within(1, 1e6), "of a rollout"),
        ("prompt-tokens", tokens, "before the first turn"),
        ("sampled-tokens", within(1, 1e9), "of a rollout"),
        ("tool-tokens", tokens, "that tools answer, of a rollout"),
        ("tool-s", within(0, 1e6), "a turn waits for its tool"),
        ("signal-share", a_share, "of rollouts that are trained on"),
        ("solved-share", a_share, "of rollouts that solve their task"),
        ("changed-share", a_share, "of the weights, a version"),
        ("link-gbits", within(1e-3, 1e6), "from learner to engines (10)"),
    ):
        plan.add_argument(f"--{name}", type=kind, metavar="N", help=help)
    plan.add_argument("--against", type=Path, metavar="RUN", help="take a run's rollouts, and tell how far it is off")
    plan.add_argument("--json", action="store_true")


def _run_commands(commands: Commands[Parser]) -> None:
    run = add(commands, "run", "run:run", "run a config from nothing to a better model")
    run.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a config.toml (not needed to resume)")
    run.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a value (repeatable)")
    run.add_argument("--dry-run", action="store_true", help="check everything, print the effective config, do nothing")
    run.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="go on with a stopped run (default: the newest)"
    )
    run.add_argument(
        "--on",
        type=cluster,
        default=LOCAL,
        metavar="PLACE",
        help="local (default), ray, HOST:PORT or ray://HOST:PORT: a Ray cluster",
    )
    run.add_argument(
        "--changed-plugins", action="store_true", help="with --resume: go on with plug-ins whose code has changed"
    )
    run.add_argument("--name", help="the run's folder under runs/ (default: config name, date and time)")
    init = add(commands, "init", "init:init", "write a config and tasks to start from, into a new folder")
    init.add_argument("folder", type=Path, metavar="DIR")
    init.add_argument(
        "--start", type=Path, metavar="CHECKPOINT", help="begin with this model (default: a small new one)"
    )
    status = add(commands, "status", "run:status", "what a run is doing now")
    _run_argument(status)
    status.add_argument("--watch", action="store_true", help="look again and again, until the run has ended or Ctrl-C")
    status.add_argument("--words", action="store_true", help="say what the words of the view mean, too")
    stop = add(commands, "stop", "run:stop", "stop a run cleanly; it can be resumed")
    _run_argument(stop)
    stop.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    evaluate = add(commands, "eval", "evaluate:evaluate", "solve rate of a checkpoint on held-out or validation tasks")
    evaluate.add_argument("checkpoint", type=Path, metavar="CHECKPOINT|RUN")
    evaluate.add_argument(
        "--config", type=Path, required=False, help="where tasks and harness are set (default: the run's)"
    )
    evaluate.add_argument("--split", choices=["validation", "heldout", "transfer"], default="validation")
    evaluate.add_argument("--tasks", type=positive, default=128, metavar="N")
    evaluate.add_argument("--tries", type=positive, default=1, metavar="K", help="rollouts a task, for best-of-k")
    evaluate.add_argument("--set", action="append", default=[], metavar="a.b=c")


def _look_commands(commands: Commands[Parser]) -> None:
    compare = add(commands, "compare", "look:compare", "two runs' held-out results, with intervals")
    compare.add_argument("run_a", type=Path, metavar="RUN")
    compare.add_argument("run_b", type=Path, metavar="RUN")
    _run_argument(add(commands, "report", "look:report", "write report.html and summary.json again"))
    _run_argument(add(commands, "fsck", "fsck:check", "read and prove every file of a run against its checksums"))
    replay = add(commands, "replay", "replay:run", "redo a training step from disk; exit code 1 when a bit differs")
    _run_argument(replay)
    replay.add_argument("step", type=positive, metavar="STEP", help="a step of the current weights' lineage, from 1 on")
    replay.add_argument(
        "--from", dest="start", type=Path, metavar="CHECKPOINT", help="where to begin (default: the nearest before it)"
    )
    replay.add_argument("--json", action="store_true", help="print every step's digests and numbers as JSON")
    rollouts = commands.add_parser("rollouts", help="look at rollouts").add_subparsers(required=True, metavar="COMMAND")
    listing = add(rollouts, "list", "rollouts:listed", "rollouts of a run, newest last")
    _run_argument(listing)
    listing.add_argument("--state", help="only this state")
    listing.add_argument("--eval", metavar="NAME", help="those of evals/NAME.parquet: before, after, during-000010 ...")
    listing.add_argument("--limit", type=positive, default=40)
    show = add(rollouts, "show", "rollouts:show", "one rollout of training or of an evaluation, turn by turn")
    _run_argument(show)
    show.add_argument("rollout_id", metavar="ROLLOUT")
    ledger = commands.add_parser("ledger", help="the record of rollouts").add_subparsers(
        required=True, metavar="COMMAND"
    )
    audit = add(ledger, "audit", "look:ledger_audit", "recompute from traces and manifests: lost, trained twice")
    _run_argument(audit)
    audit.add_argument("--new", action="store_true", help="only what came after the last audit that found all sound")


def _task_commands(commands: Commands[Parser]) -> None:
    tasks = commands.add_parser("tasks", help="look at tasks, prove them, mine new ones").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = add(tasks, "check", "tasks:check", "prove tasks: the reference scores 1, the untouched state 0")
    show = add(tasks, "show", "tasks:show", "show one task")
    for parser in (check, show):
        parser.add_argument(
            "source",
            metavar="SOURCE",
            help="repair, humaneval:PATH, swe:PATH, harbor:PATH, verifiers:NAME or a directory",
        )
        parser.add_argument("--seed", type=int, default=0)
    splits = ["train", "validation", "heldout", "transfer"]
    check.add_argument("--split", choices=[*splits, "all"], default="train")
    check.add_argument("--num", type=positive, metavar="N", help="how many tasks of each split (default: all, or 100)")
    check.add_argument("--mutants", type=positive, default=0, metavar="N", help="wrong patches to try on each task")
    check.add_argument("--within", type=positive, metavar="S", help="begin no task's mutants after so many seconds")
    check.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="verdicts on each reference, with --mutants"
    )
    check.add_argument("--leaks", action="store_true", help="look for the answers in what agents can read")
    check.add_argument(
        "--out",
        type=written,
        metavar="FILE.json",
        help="write a report on every task; mutants go on from there",
    )
    check.add_argument("--images", type=Path, metavar="STORE", help="where tasks' images are; missing ones are built")
    backend_and_jobs(check)
    accepts_unbounded(check)
    show.add_argument("--split", choices=splits, default="train")
    show.add_argument("--index", type=int, default=0)
    show.add_argument("--answer", action="store_true", help="show the hidden side, too")
    mine = add(tasks, "mine", "task_mining:mine", "make tasks from a repository's history and tests")
    mine.add_argument("repository", type=Path, metavar="REPO", help="a Git repository; with --deletions any folder")
    mine.add_argument("--out", type=Path, default=Path("tasks-mined"), metavar="DIR", help="(default: tasks-mined)")
    mine.add_argument("--num", type=positive, default=200, metavar="N", help="how many commits, or functions, to try")
    mine.add_argument("--deletions", action="store_true", help="delete tested functions in place of reading history")
    mine.add_argument("--module", action="append", default=[], metavar="PATH", help="whose functions (repeatable)")
    mine.add_argument("--deadline", type=positive, default=60, metavar="S", help="of each run of tests, in seconds")
    backend_and_jobs(mine)
    accepts_unbounded(mine)


def _weights_commands(commands: Commands[Parser]) -> None:
    weights = commands.add_parser("weights", help="weights as they travel: deltas, files, chains").add_subparsers(
        required=True, metavar="COMMAND"
    )
    log = add(weights, "log", "weights:log", "every version: bytes, ratio, share of the bound")
    log.add_argument("run", nargs="?", type=place, metavar="RUN|STORE", help="(default: the newest in runs/)")
    _channel_argument(log)
    diff = add(weights, "diff", "weights:diff", "what changed between two checkpoints, or two versions, by tensor")
    diff.add_argument("a", metavar="A", help="a checkpoint directory, a .safetensors file, or a version or its step")
    diff.add_argument("b", metavar="B")
    diff.add_argument(
        "run", nargs="?", type=place, metavar="RUN|STORE", help="whose versions (default: the newest in runs/)"
    )
    _channel_argument(diff)
    diff.add_argument("--plot", type=Path, metavar="OUT.html", help="draw it on a page of its own (checkpoints)")
    diff.add_argument("--all", action="store_true", help="every tensor, not the heaviest alone (checkpoints)")
    encode = add(weights, "encode", "weights_files:encode", "write the delta file that makes checkpoint B out of A")
    encode.add_argument("a", type=Path, metavar="A")
    encode.add_argument("b", type=Path, metavar="B")
    encode.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    for parser in (diff, encode):
        parser.add_argument("--mode", choices=["best", "fast"], default="best", help="fewest bytes, or least time")
    apply = add(weights, "apply", "weights_files:apply", "write the checkpoint that a delta file makes out of A")
    apply.add_argument("a", type=Path, metavar="A")
    apply.add_argument("delta", type=Path, metavar="FILE")
    apply.add_argument("-o", "--out", type=Path, required=True, metavar="DIRECTORY")
    verify = add(weights, "verify", "weights:verify", "check every digest of a run's chain, or of a delta file")
    verify.add_argument("run", nargs="?", type=Path, metavar="RUN|FILE", help="(default: the newest in runs/)")
    verify.add_argument("--base", type=Path, metavar="A", help="the checkpoint that a delta FILE is for")
    repair = add(weights, "repair", "weights:repair", "set a lost or damaged pointer to the newest published version")
    repair.add_argument("run", nargs="?", metavar="RUN|STORE", help="(default: the newest in runs/)")
    _channel_argument(repair)
    repair.add_argument("--key", type=Path, metavar="FILE", help="the private key, if the channel's pointer was signed")
    _store_commands(weights)


def _store_commands(weights: Commands[Parser]) -> None:
    publish = add(weights, "publish", "weights_store:publish", "publish a checkpoint as a channel's next version")
    publish.add_argument("checkpoint", type=Path, metavar="DIR", help="a checkpoint directory, or a .safetensors file")
    publish.add_argument("--step", type=step, metavar="N", help="above the head's (default: the head's and one)")
    publish.add_argument(
        "--other-tensors", action="store_true", help="also with other names, dtypes or shapes than the head's tensors"
    )
    follow = add(weights, "follow", "weights_store:follow", "keep a checkpoint directory at a channel's head")
    gc = add(weights, "gc", "weights_store:gc", "delete what no version needs any more; the first call only looks")
    gc.add_argument("--keep", type=duration, default="7d", metavar="TIME", help="every head within it can be rebuilt")
    fsck = add(weights, "fsck", "weights_store:check", "read all of a channel, and rebuild every version by every way")
    point = add(weights, "point", "weights_store:point", "let a branch, or the channel, name a version: a rollback")
    relay = add(weights, "relay", "weights_store:relay", "serve a store, read-only, to machines that share no disk")
    relay.add_argument("--listen", required=True, metavar="HOST:PORT", help="$ETUDE_TOKEN guards what others can reach")
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
        _channel_argument(parser)
    follow.add_argument("--apply", type=Path, required=True, metavar="DIR", help="made if it is not there")
    point.add_argument("version", metavar="VERSION", help="v000003, 3, or more of its name")
    for parser in (follow, point):
        parser.add_argument(
            "--branch", type=branch, default="", metavar="NAME", help="a canary, say (default: the channel itself)"
        )
    for parser in (publish, gc, point):
        parser.add_argument(
            "--key", type=Path, metavar="FILE", help="the private key that signs the channel's pointers"
        )
    follow.add_argument("--public-key", type=public_key, metavar="HEX", help="believe only what its owner signed")
    follow.add_argument("--poll", type=duration, default="1s", metavar="TIME", help="how often the pointer is read")
    follow.add_argument("--once", action="store_true", help="come to the head and end")
    for parser in (follow, relay):
        parser.add_argument("--cache", type=Path, metavar="DIR", help="where all of a region share downloads")

    key = add(weights, "key", "weights:key", "draw a private key for signing, and say its public one")
    key.add_argument("file", type=Path, metavar="FILE")


def _channel_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", type=channel, default="policy", metavar="CHANNEL", help="(default: policy)")


def _model_commands(commands: Commands[Parser]) -> None:
    serve = add(commands, "serve", "serve:serve", "serve a checkpoint or a run's newest version, OpenAI-compatible")
    serve.add_argument("model", nargs="?", type=Path, metavar="CHECKPOINT|RUN")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=port, default=8000)
    serve.add_argument("--key", help="the API key that clients must send (default: $ETUDE_API_KEY, else none)")
    serve.add_argument("--max-concurrent", type=positive, default=32)
    serve.add_argument("--public-key", type=public_key, metavar="HEX", help="serve only versions that its owner signed")
    serve.add_argument("--fleet", metavar="URL", help="ask the engines of the run whose registry listens there")
    _parity_command(commands)
    export = add(commands, "export", "serve:export", "write a run's version as a Hugging Face directory")
    export.add_argument("source", metavar="CHECKPOINT|RUN|RUN@STEP")
    export.add_argument("out", type=Path, metavar="DIRECTORY")
    export.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    formats = ["none", "mxfp8", "nvfp4", "mxfp4"]
    export.add_argument("--quantise", choices=formats, default="none", help="the format of large matrices")
    export.add_argument("--adapter", action="store_true", help="the adapter alone, as peft and vLLM read it")


def _engine_commands(commands: Commands[Parser]) -> None:
    engines = commands.add_parser("engines", help="engines of another make: install, look, try").add_subparsers(
        required=True, metavar="COMMAND"
    )
    install = add(engines, "install", "engines:install_kind", "make an environment for an engine; goes on where it was")
    install.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    listing = add(engines, "list", "engines:listed", "every kind of engine, and whether it is here")
    check = add(engines, "check", "engines:check", "start one over a tiny model, sample, score, and follow a version")
    install.add_argument("kind", choices=["vllm", "sglang"], metavar="KIND", help="vllm or sglang")
    check.add_argument(
        "kind", choices=["reference", "vllm", "sglang"], metavar="KIND", help="reference, vllm or sglang"
    )
    for parser in (install, listing, check):
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="DIR",
            help="of the environment (default: $ETUDE_VLLM, $ETUDE_SGLANG, or the user's cache)",
        )


def _fleet_commands(commands: Commands[Parser]) -> None:
    fleet = commands.add_parser("fleet", help="the engines that joined a run from elsewhere")
    group = fleet.add_subparsers(required=True, metavar="COMMAND")
    listing = add(group, "list", "fleet:listed", "each engine: state, version, load")
    drain = add(group, "drain", "fleet:drain", "give an engine nothing new; it leaves when it has finished")
    join = add(group, "join", "fleet:join", "register an engine of any kind that runs already, and keep it registered")
    for one in (listing, drain, join):
        one.add_argument("registry", metavar="REGISTRY", help="http://HOST:PORT, the run's fleet.listen")
    drain.add_argument("name", metavar="ENGINE")
    join.add_argument("engine", metavar="URL", help="of the engine, as the run reaches it")
    join.add_argument("--name", required=True)
    join.add_argument("--wait-s", type=within(0, 1e7), help="for a registry that is away (default 3600)")
    join.add_argument("--region", default="", help="its lane in the report (default: its name)")
    join.add_argument("--standby", action="store_true", help="work when others are lost")


def _parity_command(commands: Commands[Parser]) -> None:
    parser = add(
        commands, "parity", "parity:parity", "how far an engine and the learner are apart, and where it begins"
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT|RUN")
    parser.add_argument(
        "--engine",
        metavar="URL|transformers",
        help="what samples: the URL of python -m etude.inference.server or of vllm serve, not that of etude serve "
        "(default: our engine, in this process)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of both sides, or of the engine (default: a run's own, else float32)"
    )
    parser.add_argument("--learner-dtype", choices=_DTYPES, help="of the learner alone (default: --dtype)")
    parser.add_argument(
        "--mode", choices=["exact", "native"], help="default: a run's own, else exact; with --engine native"
    )
    parser.add_argument(
        "--quant", choices=["none", "mxfp8", "nvfp4", "mxfp4"], help="default: a run's own; with --engine none"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="what prompts are cut from (default: random tokens)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="to sample after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--k3", type=float, metavar="NATS", help="the budget (default: by dtype; 0 in exact mode)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=written, metavar="FILE.html", help="write a page with the histograms")
