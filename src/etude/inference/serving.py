"""The common part of all engine processes: command-line arguments, socket and ready file. Imports no torch.

The ready file gets ``{"url", "pid", "name"}`` as JSON once the engine serves."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp

from etude.config import Plugin, build, named, to_plain
from etude.errors import EngineError, EtudeError
from etude.inference.config import EngineConfig, Speculation
from etude.inference.registry_client import WAIT_S, print_to_stderr
from etude.inference.registry_messages import EngineRequirements, environment_token
from etude.records.completion import Version
from etude.stores.http import HttpStore
from etude.telemetry import Telemetry
from etude.weights.chain.history import head

STORE_TIMEOUT_S = 5.0  # for the first response of a store over HTTP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that all kinds of engines have to `parser`."""
    parser.add_argument("--name", default="engine", help="its name in completions and events")
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face directory")
    parser.add_argument("--store", help="the blob store with the weight chain: a directory, or s3://bucket/...")
    parser.add_argument(
        "--public-key",
        type=public_key,
        metavar="HEX",
        help="accept only weights whose pointer the owner of this key signed",
    )
    parser.add_argument("--branch", default="", help="follow this branch of the weights (default: the newest version)")
    parser.add_argument(
        "--version",
        type=published_version,
        metavar="STEP/INCARNATION/DIGEST",
        help="the published version that the checkpoint is (default: step 0)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free port, see the ready file")
    parser.add_argument("--ready-file", type=Path, help="where to write the URL, as JSON, once it serves")
    for setting in dataclasses.fields(EngineConfig):
        kind: Callable[[str], object] = speculation if setting.name == "speculation" else type(setting.default)
        parser.add_argument(f"--{setting.name.replace('_', '-')}", type=kind, help=f"default {setting.default}")
    parser.add_argument("--poll-s", type=float, default=0.05, help="interval at which the weight pointer is read")
    parser.add_argument("--telemetry", type=Path, help="the events file")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model's computation")
    parser.add_argument("--watch-stdin", action="store_true", help="also exit at the end of standard input")
    parser.add_argument("--register", metavar="URL", help="join the run with the registry at this URL (fleet.listen)")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=WAIT_S,
        help="longest wait for the registry, or for the first version (default %(default)g)",
    )
    parser.add_argument(
        "--advertise", metavar="URL", help="URL at which the run reaches this engine, if not its listening address"
    )
    parser.add_argument("--region", default="", help="its region, a lane in the report (default: its name)")
    parser.add_argument(
        "--standby", action="store_true", help="follow the weights; get requests only when other engines are lost"
    )
    parser.add_argument("--cache", type=Path, help="a directory in which engines of a region share downloads")


def speculation(text: str) -> Speculation | Plugin:
    """Parse the argument --speculation: a built-in name, an import path, or the text that `EngineConfig.arguments`
    returns for a plug-in.

    Raises `ArgumentTypeError`."""
    if text.startswith("{"):
        return Plugin(**json.loads(text))
    found = named(text, list(Speculation))
    if isinstance(found, Plugin):
        return found
    try:
        return Speculation(found)
    except ValueError:
        known = ", ".join(Speculation)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, and no import path") from None


def published_version(text: str) -> Version:
    """Parse a command-line argument that is a version: step, incarnation and digest, with slashes between them.

    >>> published_version("3/9c1e2f04/5d0c").step
    3
    """
    step, incarnation, digest = text.split("/")
    return Version(int(step), incarnation, digest)


def public_key(text: str) -> bytes:
    """Parse a command-line argument that is an Ed25519 public key in hex. Raises `ArgumentTypeError`."""
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("a public key is 64 hex characters: etude weights key prints it")
    return bytes.fromhex(text)


def apply_public_key(args: argparse.Namespace, requirements: EngineRequirements) -> None:
    """Set `args.public_key` to the key of the run that an engine joins.

    Raises `EngineError` when the engine was given another key: it would refuse every version of this run."""
    run_key = bytes.fromhex(requirements.public_key) if requirements.public_key else None
    if args.public_key and run_key != args.public_key:
        signs = f"the run signs with {requirements.public_key}" if run_key else "the run does not sign"
        raise EngineError(
            f"{args.name} would refuse the weights of the run at {args.register}",
            f"{signs}; this engine only accepts {args.public_key.hex()}",
            hint="give the run's own key to --public-key, or set stores.signing_key of the run",
        )
    args.public_key = run_key


def apply_sizes(args: argparse.Namespace, requirements: EngineRequirements) -> None:
    """Set the dtype in `args` from the run's requirements, and also the sizes and the store unless they were given."""
    args.dtype = requirements.dtype
    args.context_tokens = args.context_tokens or requirements.context_tokens
    args.max_sequences = args.max_sequences or requirements.max_sequences
    args.store = args.store or requirements.store or None


def require_weights(args: argparse.Namespace) -> None:
    """Raise `EngineError` when neither a checkpoint nor a run's store of weights was given.

    Prints a warning when the store cannot be read."""
    if args.checkpoint is None and not (args.register and args.store):
        hint = "give --checkpoint DIR, or --register URL with --store PLACE"
        raise EngineError("the engine has no weights", "neither a checkpoint nor a run's store was given", hint=hint)
    if args.register and args.store:
        warn_about_store(args.store)


def warn_about_store(place: str, report: Callable[[str], None] = print_to_stderr) -> None:
    """Call `report` with a text when an engine's store does not exist yet or cannot be read. It is tried again later.

    Buckets are not checked, since their client has long timeouts."""
    if place.startswith(("http://", "https://")):
        try:
            head(HttpStore(place, silence_s=STORE_TIMEOUT_S, deadline_s=STORE_TIMEOUT_S), "policy")
        except EtudeError as error:
            report(f"the store at {place} cannot be read now: {error.facts or error.what}; {error.hint}")
    elif "://" not in place and not Path(place).exists():
        report(f"there is no store at {place} yet: is it the run's folder of weights, as this machine has it?")


def config_of(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings from the command-line arguments. Raises `ConfigError`."""
    settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)}
    return build(EngineConfig, {k: v for k, v in settings.items() if v is not None}, "engine")


def report_settings(telemetry: Telemetry | None, config: EngineConfig, *, device: str) -> None:
    """Write the engine's settings as a telemetry event. `device` is the one that is used, where "auto" was set."""
    if telemetry is not None:
        telemetry.event("engine.settings", **{**to_plain(config), "device": device})


def serve(app: ASGIApp, listener: socket.socket, *, name: str, ready_file: Path | None) -> None:
    """Serve the app on a bound socket until the process is stopped.

    `name` is the engine's name. The server writes its URL to `ready_file` when it is ready; None: no such file."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        proxy_headers=False,  # no proxy is trusted
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    _Server(config, ready=_ready(listener, name), ready_file=ready_file).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A uvicorn server that writes the ready file once it serves."""

    def __init__(self, config: uvicorn.Config, *, ready: bytes, ready_file: Path | None) -> None:
        super().__init__(config)
        self._ready, self._ready_file = ready, ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        _freeze_garbage_collector()
        if self._ready_file is not None:
            partial = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            partial.write_bytes(self._ready)
            partial.replace(self._ready_file)
        print(self._ready.decode(), flush=True)


def _freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection.

    A full collection walks all of torch's objects, which takes 100 ms between two tokens."""
    gc.collect()
    gc.freeze()


def read_token(host: str) -> str | None:
    """Return the token in ETUDE_TOKEN, or None. Raises `EngineError` when it is missing and `host` is not loopback."""
    token = environment_token()
    if not token and host not in ("127.0.0.1", "::1", "localhost"):
        raise EngineError(
            f"an engine on {host} needs a token", "any host could use and stop it", hint="set ETUDE_TOKEN"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises `EngineError` when the address is in use or invalid.

    Call it before anything slow starts, so that an unusable address is reported early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise EngineError(
            f"cannot listen on {host}:{port}", str(error), hint="choose another --port, or 0 for a free one"
        ) from None
    return listener


def _ready(listener: socket.socket, name: str) -> bytes:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return msgspec.json.encode({"url": url, "pid": os.getpid(), "name": name})
