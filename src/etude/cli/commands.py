"""Defines the arguments of every command. Imports no library, so that `etude --help` is fast."""

from __future__ import annotations

from pathlib import Path

from etude import __version__
from etude.cli.arguments import (
    LOCAL,
    Commands,
    Parser,
    add,
    add_backend_and_jobs,
    add_run,
    add_set,
    add_unbounded_memory,
    cluster,
    group,
    origin,
    output_file,
    port,
    positive,
    public_key,
    within,
)
from etude.cli.commands_backups import add_backup_commands
from etude.cli.commands_feedback import add_feedback, add_feedback_commands
from etude.cli.commands_inspection import add_inspection_commands
from etude.cli.commands_learn import add_learn_command
from etude.cli.commands_machines import add_machine_commands
from etude.cli.commands_privacy import add_capture, add_privacy_commands
from etude.cli.commands_releases import add_release_commands
from etude.cli.commands_weights import add_weights_commands
from etude.errors import EXITS

_DTYPES = ("float32", "bfloat16", "float16")
_SPLITS = ["train", "validation", "heldout", "transfer"]


def build_parser() -> Parser:
    """Return the parser of the command line. The parsed arguments have the attribute `command`, the "module:function"
    to call."""
    exits = "exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in EXITS.items())
    about = "Mid-train and RL-train an open MoE language model in your own agent harness, and serve it."
    parser = Parser(prog="etude", description=about, epilog=exits)
    parser.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run_commands(commands)
    _add_plan_command(commands)
    _add_corpus_commands(commands)
    add_inspection_commands(commands)
    _add_task_commands(commands)
    add_machine_commands(commands)
    _add_engine_commands(commands)
    add_weights_commands(commands)
    add_release_commands(commands)
    _add_model_commands(commands)
    _add_fleet_commands(commands)
    add_privacy_commands(commands)
    add_feedback_commands(commands)
    add_learn_command(commands)
    add_backup_commands(commands)
    _add_plugin_commands(commands)
    _add_harness_commands(commands)
    return parser


def _add_run_commands(commands: Commands[Parser]) -> None:
    run = add(commands, "run", "run:run", "run a config: corpus, mid-training, RL, evaluations, report")
    run.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a config.toml (not needed with --resume)")
    add_set(run)
    run.add_argument("--dry-run", action="store_true", help="validate everything, print all settings, and exit")
    run.add_argument("--resume", nargs="?", const="", metavar="RUN", help="resume a stopped run (default: the newest)")
    run.add_argument(
        "--on",
        type=cluster,
        default=LOCAL,
        metavar="WHERE",
        help="local (default), or a Ray cluster: ray, HOST:PORT or ray://HOST:PORT",
    )
    run.add_argument(
        "--changed-plugins", action="store_true", help="with --resume: accept plug-ins whose code has changed"
    )
    run.add_argument("--name", help="name of the run's folder under runs/ (default: config name, date and time)")
    init = add(commands, "init", "init:init", "create a folder with a config and example tasks to start from")
    init.add_argument("folder", type=Path, metavar="DIR", help="the folder to create")
    init.add_argument(
        "--start", type=Path, metavar="CHECKPOINT", help="model to start from (default: a small model, random weights)"
    )
    status = add(commands, "status", "run:status", "show what a run is doing")
    add_run(status)
    status.add_argument("--watch", action="store_true", help="update the view until the run ends or Ctrl-C")
    status.add_argument("--words", action="store_true", help="also explain the terms in the view")
    stop = add(commands, "stop", "run:stop", "stop a run cleanly, so that it can be resumed")
    add_run(stop)
    stop.add_argument(
        "--deadline", type=float, default=60.0, metavar="SECONDS", help="how long to wait (default: %(default)g)"
    )
    _add_eval_commands(commands)


def _add_eval_commands(commands: Commands[Parser]) -> None:
    evaluate = add(commands, "eval", "evaluate:evaluate", "play a suite of tasks on a checkpoint or a model at a URL")
    evaluate.add_argument("suite", metavar="SUITE", help="a suite file, or a built-in suite, such as own or repair")
    who = evaluate.add_mutually_exclusive_group()
    who.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        metavar="DIR|RUN",
        help="a checkpoint, or a run's newest (default: the newest run); several: training seeds of one recipe",
    )
    who.add_argument("--url", default="", help="evaluate a model at this URL instead")
    who.add_argument("--run", type=Path, metavar="RUN", help="a run in progress, on engines that it lends")
    who.add_argument("--baseline", choices=["oracle", "random"], help="a script: reference solutions, or random edits")
    evaluate.add_argument("--model", default="", help="name of the model at the URL")
    evaluate.add_argument(
        "--share",
        type=within(0.01, 0.5),
        default=0.5,
        help="with --run: largest share of its engines to borrow (default: %(default)g)",
    )
    evaluate.add_argument(
        "--seconds", type=positive, default=600, metavar="S", help="with --run: longest loan (default: %(default)s)"
    )
    evaluate.add_argument(
        "--dialect", choices=["chat", "messages"], default="chat", help="OpenAI's API (default), or Anthropic's"
    )
    evaluate.add_argument(
        "--key-variable", default="", metavar="NAME", help="environment variable with the API key (default: no key)"
    )
    evaluate.add_argument(
        "--parallel",
        type=positive,
        default=8,
        metavar="N",
        help="most requests to the URL at once (default: %(default)s)",
    )
    evaluate.add_argument(
        "--beside", action="store_true", help="also evaluate the untrained model, without and with the suite's prompt"
    )
    evaluate.add_argument("--config", type=Path, help="config with tasks and harness (default: the config of the run)")
    evaluate.add_argument("--source", default="", metavar="SOURCE", help="task source in place of the suite's")
    evaluate.add_argument("--split", choices=_SPLITS, help="split of the tasks (default: those of the suite)")
    evaluate.add_argument("--tasks", type=positive, metavar="N", help="number of tasks (default: that of the suite)")
    evaluate.add_argument("--tries", type=positive, metavar="K", help="rollouts per task (default: that of the suite)")
    evaluate.add_argument("--prices", type=Path, metavar="FILE", help="table of prices, for dollars per solved task")
    evaluate.add_argument(
        "--price-name", default="", metavar="NAME", help="the model's name in this table (default: policy)"
    )
    evaluate.add_argument("--gpu", default="", metavar="KIND", help="pay the engines by the hour of this kind of GPU")
    evaluate.add_argument(
        "--gpus", type=positive, default=1, metavar="N", help="number of these GPUs (default: %(default)s)"
    )
    evaluate.add_argument("--name", default="", metavar="LABEL", help="the model's name in results (default: its path)")
    evaluate.add_argument(
        "--out", type=Path, default=Path("evals"), metavar="DIR", help="folder for results (default: %(default)s)"
    )
    add_set(evaluate)
    board = add(commands, "leaderboard", "evaluate:leaderboard", "compare the results of suites, as a table and a page")
    board.add_argument(
        "folder", nargs="?", type=Path, default=Path("evals"), metavar="DIR", help="results (default: %(default)s)"
    )
    board.add_argument(
        "--html", type=Path, metavar="FILE", help="where to write the page (default: DIR/leaderboard.html)"
    )


def _add_plan_command(commands: Commands[Parser]) -> None:
    plan = add(commands, "plan", "plan:print_plan", "estimate memory, time and cost of a run, and its bottlenecks")
    plan.add_argument("config", type=Path, metavar="CONFIG", help="a config.toml, or a checkpoint directory")
    add_set(plan)
    plan.add_argument(
        "--hardware", default="cpu", metavar="NAME", help="h100, h200, b200, or cpu: this machine, measured (default)"
    )
    plan.add_argument(
        "--learner-ranks", type=positive, metavar="N", help="ranks of the learner (default: the config's)"
    )
    plan.add_argument("--engines", type=positive, metavar="N", help="number of engines (default: the config's)")
    plan.add_argument("--engine-hardware", metavar="NAME", help="hardware of the engines, if it differs")
    plan.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=N",
        help="price in dollars per hour of a device, or of cpu",
    )
    region = "NAME:ENGINES:GBITS:MS"
    plan.add_argument(
        "--region",
        action="append",
        default=[],
        metavar=region,
        help="engines in another region: name, number, Gbit/s, round trip in ms",
    )
    plan.add_argument("--engine-ranks", type=positive, metavar="N", help="devices per engine (default: the config's)")
    fraction, tokens = within(0, 1), within(0, 1e9)
    for name, kind, help in (
        ("turns", within(1, 1e6), "turns per rollout"),
        ("prompt-tokens", tokens, "prompt tokens before the first turn"),
        ("sampled-tokens", within(1, 1e9), "sampled tokens per rollout"),
        ("tool-tokens", tokens, "tokens of tool outputs per rollout"),
        ("tool-s", within(0, 1e6), "seconds that a turn waits for its tool"),
        ("signal-share", fraction, "fraction of rollouts that are trained on"),
        ("solved-share", fraction, "fraction of rollouts that solve their task"),
        ("changed-share", fraction, "fraction of weights that change per version"),
        ("link-gbits", within(1e-3, 1e6), "bandwidth from learner to engines in Gbit/s (10)"),
    ):
        plan.add_argument(f"--{name}", type=kind, metavar="N", help=help)
    plan.add_argument(
        "--against", type=Path, metavar="RUN", help="use the rollout statistics of a run, and compare the plan with it"
    )
    plan.add_argument(
        "--balance",
        action="store_true",
        help="how many devices for rollouts the learner needs, and what that depends on (not for cpu)",
    )
    plan.add_argument(
        "--production",
        type=Path,
        metavar="TOML",
        help="settings of a production fleet: print how many of its engines can be lent to rollouts on average",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")


def _add_corpus_commands(commands: Commands[Parser]) -> None:
    corpus = group(commands, "corpus", "build, show and verify training shards from your own text")
    build = add(corpus, "build", "corpus:build", "filter, deduplicate, decontaminate and encode texts as shards")
    build.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file with sources, tokenizer and phases")
    build.add_argument("folder", type=Path, metavar="DIR", help="the folder to create, or an unfinished build")
    add_set(build)
    build.add_argument("--jobs", type=positive, metavar="N", help="number of processes (default: one per core)")
    look = add(corpus, "look", "corpus:look", "show counts, documents, and what was dropped and why")
    look.add_argument("folder", type=Path, metavar="DIR", help="a corpus")
    look.add_argument("--documents", type=positive, default=2, metavar="N", help="of each phase (default: %(default)s)")
    check = add(corpus, "check", "corpus:check", "verify digests, vocabulary and tokenizer of a corpus")
    check.add_argument("folder", type=Path, metavar="DIR", help="a corpus")
    for command in (look, check):
        command.add_argument(
            "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json that must be the corpus's"
        )


def _add_task_commands(commands: Commands[Parser]) -> None:
    tasks = group(commands, "tasks", "check, show and mine tasks")
    check = add(tasks, "check", "tasks:check", "verify tasks: the reference solution scores 1, unchanged files 0")
    show = add(tasks, "show", "tasks:show", "show one task")
    source = "repair, humaneval:PATH, swe:PATH, harbor:PATH, verifiers:NAME or a directory"
    for parser in (check, show):
        parser.add_argument("source", metavar="SOURCE", help=source)
        parser.add_argument("--seed", type=int, default=0, help="seed of generated tasks (default: %(default)s)")
    check.add_argument(
        "--split", choices=[*_SPLITS, "all"], default="train", help="split of the tasks (default: %(default)s)"
    )
    check.add_argument("--num", type=positive, metavar="N", help="tasks per split (default: all, or 100)")
    check.add_argument("--mutants", type=positive, default=0, metavar="N", help="wrong patches to try on each task")
    check.add_argument("--within", type=positive, metavar="S", help="start no new mutants after S seconds")
    check.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="with --mutants: grade each reference N times"
    )
    check.add_argument("--leaks", action="store_true", help="search everything that agents can read for the answers")
    check.add_argument(
        "--out", type=output_file, metavar="FILE.json", help="write a report; a repeated command resumes its mutants"
    )
    check.add_argument("--images", type=Path, metavar="STORE", help="store of task images; missing ones are built")
    add_backend_and_jobs(check)
    add_unbounded_memory(check)
    show.add_argument("--split", choices=_SPLITS, default="train", help="split of the task (default: %(default)s)")
    show.add_argument("--index", type=int, default=0, help="index in the split, from 0 (default: %(default)s)")
    show.add_argument("--answer", action="store_true", help="also show the hidden answer")
    mine = add(tasks, "mine", "tasks:mine", "make tasks from the history and tests of a repository")
    mine.add_argument("repository", type=Path, metavar="REPO", help="a Git repository; with --deletions any folder")
    mine.add_argument(
        "--out",
        type=Path,
        default=Path("tasks-mined"),
        metavar="DIR",
        help="folder for the tasks (default: %(default)s)",
    )
    mine.add_argument(
        "--num", type=positive, default=200, metavar="N", help="commits or functions to try (default: %(default)s)"
    )
    mine.add_argument("--deletions", action="store_true", help="delete tested functions instead of using commits")
    mine.add_argument(
        "--module", action="append", default=[], metavar="PATH", help="with --deletions: only this module (repeatable)"
    )
    mine.add_argument(
        "--deadline", type=positive, default=60, metavar="S", help="seconds for each test run (default: %(default)s)"
    )
    add_backend_and_jobs(mine)
    add_unbounded_memory(mine)
    sessions = add(tasks, "sessions", "tasks:sessions", "make tasks from sessions of users who allow training")
    sessions.add_argument(
        "folder", type=Path, nargs="*", metavar="FOLDER", help="a session's folder (none: list what is stored)"
    )
    sessions.add_argument(
        "--privacy", type=Path, required=True, metavar="DIR", help="the folder of etude serve --capture"
    )
    add_backend_and_jobs(sessions)
    add_unbounded_memory(sessions)


def _add_engine_commands(commands: Commands[Parser]) -> None:
    engines = group(commands, "engines", "install and check vLLM and SGLang")
    install = add(engines, "install", "engines:install_kind", "create an environment with an engine; can be repeated")
    install.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the engine (default: %(default)s)"
    )
    listing = add(engines, "list", "engines:list_engines", "list the kinds of engines and whether they are installed")
    check = add(
        engines, "check", "engines:check", "start an engine with a tiny model: sample, score, load a new version"
    )
    install.add_argument("kind", choices=["vllm", "sglang"], metavar="KIND", help="vllm or sglang")
    check.add_argument(
        "kind", choices=["reference", "vllm", "sglang"], metavar="KIND", help="reference, vllm or sglang"
    )
    for parser in (install, listing, check):
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="DIR",
            help="folder of the environment (default: $ETUDE_VLLM, $ETUDE_SGLANG, or the user's cache)",
        )


def _add_model_commands(commands: Commands[Parser]) -> None:
    about = "serve checkpoints and versions of runs, with the APIs of OpenAI and Anthropic"
    serve = add(commands, "serve", "serve:serve", about)
    serve.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]CHECKPOINT|RUN[@STEP|@BRANCH]",
        help="models to serve: checkpoint directories, runs (of each the branch stable, or else the newest version) or"
        " versions of runs; NAME is the name for clients (default: the newest run in runs/)",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=port, default=8000, help="port to listen on (default: %(default)s)")
    serve.add_argument("--key", help="API key that clients must send (default: $ETUDE_API_KEY, else none)")
    serve.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="TOML file of API keys, with limits of requests a minute and tokens a day",
    )
    serve.add_argument(
        "--cors",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin send requests, * for all (repeatable)",
    )
    serve.add_argument(
        "--max-concurrent",
        type=positive,
        default=32,
        help="answers that each model samples at the same time (default: %(default)s)",
    )
    serve.add_argument(
        "--public-key", type=public_key, metavar="HEX", help="serve only versions signed with the matching private key"
    )
    serve.add_argument(
        "--releases",
        type=Path,
        metavar="FILE",
        help="serve the branches stable and canary of a run; the releases in this file choose one for each user",
    )
    serve.add_argument("--newest", action="store_true", help="serve the newest version of a run, not its branch stable")
    serve.add_argument("--fleet", metavar="URL", help="use the engines of a run, by the URL of its registry")
    serve.add_argument(
        "--lend",
        type=Path,
        metavar="FILE",
        help="start several engines and lend idle ones to the rollouts of the run; FILE (TOML) has the settings",
    )
    serve.add_argument(
        "--engine",
        choices=["reference", "vllm", "sglang"],
        default="reference",
        metavar="KIND",
        help="the software of the engines: reference, vllm or sglang (default: %(default)s)",
    )
    serve.add_argument(
        "--no-summaries",
        action="store_true",
        help="refuse conversations that exceed the context, instead of summarising them",
    )
    add_capture(serve)
    add_feedback(serve)
    _add_parity_command(commands)
    export = add(commands, "export", "serve:export", "write a model as a Hugging Face directory")
    export.add_argument(
        "source", metavar="CHECKPOINT|RUN|RUN@STEP", help="a checkpoint, the result of a run, or one of its versions"
    )
    export.add_argument("out", type=Path, metavar="DIRECTORY", help="the new directory")
    export.add_argument(
        "--dtype", choices=["bf16", "f32"], default="bf16", help="dtype of the weights (default: %(default)s)"
    )
    formats = ["none", "mxfp8", "nvfp4", "mxfp4"]
    export.add_argument(
        "--quantise", choices=formats, default="none", help="format of the large matrices (default: %(default)s)"
    )
    export.add_argument("--adapter", action="store_true", help="only the LoRA adapter, in the format of peft and vLLM")
    models = group(commands, "models", "list the model families, check a checkpoint directory")
    add(
        models,
        "list",
        "models:list_families",
        "list every model family: its architecture, what varies, what is refused",
    )
    about = "describe a checkpoint, and everything that etude cannot use in it; reads no weights"
    check = add(models, "check", "models:check", about)
    check.add_argument("folder", type=Path, metavar="DIR", help="a Hugging Face directory")
    _add_base_command(commands)


def _add_base_command(commands: Commands[Parser]) -> None:
    base = group(commands, "base", "compare base models on your own text")
    about = "measure which base model to start from: loss on your text, look-ups, state tracking, cost"
    compare = add(base, "compare", "base:compare", about)
    compare.add_argument("models", nargs="+", metavar="[NAME=]DIR", help="Hugging Face directories")
    compare.add_argument("--text", type=Path, required=True, metavar="FOLDER", help="a folder with your text or code")
    compare.add_argument(
        "--files", action="append", metavar="PATTERN", help='only these files, such as "*.py" (repeatable)'
    )
    compare.add_argument(
        "--documents", type=positive, default=200, metavar="N", help="documents to measure (default: %(default)s)"
    )
    compare.add_argument(
        "--questions", type=positive, default=100, metavar="N", help="questions of each kind (default: %(default)s)"
    )
    compare.add_argument(
        "--context", type=positive, default=2048, metavar="TOKENS", help="longest context (default: %(default)s)"
    )
    compare.add_argument("--hardware", metavar="NAME", help="add the cost of serving on h100, h200 or b200")
    compare.add_argument("--seed", type=int, default=0, help="of the draw of documents and questions (default: 0)")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")


def _add_parity_command(commands: Commands[Parser]) -> None:
    help = "compare the log-probabilities of an engine and the learner, and find the first operator that differs"
    parser = add(commands, "parity", "parity:parity", help)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT|RUN", help="the model to compare with")
    parser.add_argument(
        "--engine",
        metavar="URL|transformers",
        help="the engine: URL of python -m etude.inference.server or of vllm serve, not of etude serve "
        "(default: the reference engine, in this process)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="compute dtype of both, or of the engine (default: the run's, else float32)"
    )
    parser.add_argument("--learner-dtype", choices=_DTYPES, help="compute dtype of the learner (default: --dtype)")
    parser.add_argument(
        "--mode",
        choices=["exact", "native"],
        help="arithmetic: exact (equal bits) or native (default: the run's, else exact; native with --engine)",
    )
    parser.add_argument(
        "--quant",
        choices=["none", "mxfp8", "nvfp4", "mxfp4"],
        help="format of the large matrices (default: the run's; none with --engine)",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for prompts (default: random tokens)")
    parser.add_argument(
        "--prompts", type=positive, default=8, metavar="N", help="number of prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="tokens to sample per prompt (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples (default: %(default)s)")
    parser.add_argument(
        "--k3", type=float, metavar="NATS", help="largest KL estimate to accept (default: by dtype; 0 in exact mode)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=output_file, metavar="FILE.html", help="write a page with histograms")


def _add_fleet_commands(commands: Commands[Parser]) -> None:
    fleet = group(commands, "fleet", "list, drain and register the engines of a run")
    listing = add(fleet, "list", "fleet:list_engines", "list the engines: state, version, load")
    drain = add(fleet, "drain", "fleet:drain", "send no new requests to an engine; it leaves when it is idle")
    join = add(fleet, "join", "fleet:join", "register an engine that is already running, and keep it registered")
    for parser in (listing, drain, join):
        parser.add_argument("registry", metavar="REGISTRY", help="http://HOST:PORT, the run's fleet.listen")
    drain.add_argument("name", metavar="ENGINE", help="name of the engine, as listed")
    join.add_argument("engine", metavar="URL", help="URL of the engine, as the run can reach it")
    join.add_argument("--name", required=True, help="name of the engine in the run")
    join.add_argument(
        "--wait-s", type=within(0, 1e7), help="seconds to wait for a registry that does not answer (default: 3600)"
    )
    join.add_argument("--region", default="", help="region of the engine in the report (default: its name)")
    join.add_argument("--standby", action="store_true", help="serve requests only while other engines are lost")


def _add_plugin_commands(commands: Commands[Parser]) -> None:
    plugins = group(commands, "plugins", "list the kinds of plug-ins, check a plug-in")
    add(plugins, "list", "plugins:list_kinds", "list every kind of plug-in, its setting, and the built-in choices")
    check = add(plugins, "check", "plugins:check", "run the contract tests on a plug-in")
    check.add_argument("path", metavar="my_package.module:Name", help="import path of the class or function")
    check.add_argument("--kind", metavar="KIND", help="kind, as listed by `etude plugins list` (default: detected)")
    check.add_argument(
        "--set", action="append", default=[], metavar="a=b", help="a setting of the plug-in (repeatable)"
    )


def _add_harness_commands(commands: Commands[Parser]) -> None:
    harness = group(commands, "harness", "check the agent program of a config")
    what = (
        "run one task through a config's agent program with a scripted model, and show what would be trained; "
        "exit code 1 if it finds a problem"
    )
    check = add(harness, "check", "harness:check", what)
    check.add_argument("config", type=Path, metavar="CONFIG", help="a config.toml")
    add_set(check)
    check.add_argument("--split", choices=_SPLITS, default="train", help="split of the task (default: %(default)s)")
    check.add_argument("--task", type=int, default=0, metavar="N", help="index of the task, from 0 (default: 0)")
    check.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="answers of the scripted model, one JSON value a line: a text, or a call as"
        ' {"name": ..., "arguments": {...}} (default: it calls the first tool, then submits or says ok)',
    )
    check.add_argument(
        "--lines", type=positive, default=40, metavar="N", help="lines of the program's log to print (default: 40)"
    )
