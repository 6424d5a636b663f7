"""``etude machines serve``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import secrets
import signal

from etude.environments.backends import open_memory_bounded
from etude.environments.remote import Keyring, Quota, ServerConfig, create_app, serving
from etude.environments.remote.templates import read_templates
from etude.errors import Exit, InputError


def serve(args: argparse.Namespace) -> int:
    """Serve until interrupted. The first SIGTERM lets machines finish, the second, or Ctrl-C, does not."""
    if args.keys is None and not _is_loopback(args.host):
        hint = "write a file of keys (--keys FILE), or keep --host 127.0.0.1"
        raise InputError(f"host {args.host!r} is open to the network", "there are no keys", hint=hint)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(args))
    return Exit.DONE


async def _serve(args: argparse.Namespace) -> None:
    config = ServerConfig(host=args.host, port=args.port, domain=args.domain, drain_s=args.drain)
    own = "" if args.keys else f"e2b_{secrets.token_hex(20)}"
    keys = Keyring.read(args.keys) if args.keys else Keyring({"me": Quota(key=own, max_live=64)})
    templates = read_templates(args.templates) if args.templates else {}
    told, work = asyncio.Event(), asyncio.current_task()
    assert work is not None, "runs in a task"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    loop.add_signal_handler(signal.SIGTERM, lambda: work.cancel() if told.is_set() else told.set())
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory)
    try:
        app = create_app(runtime, keys, templates=templates, config=config)
        await app.state.boxes.prepare()
        async with serving(app, host=config.host, port=config.port) as url:
            print(f"serving {args.backend} machines at {url}", flush=True)
            print(f"export E2B_API_URL={url} E2B_SANDBOX_URL={url}{f' E2B_API_KEY={own}' if own else ''}", flush=True)
            await told.wait()
            print(f"no new machines; those there are have {config.drain_s:g} s", flush=True)
            await app.state.boxes.drain(config.drain_s)
    finally:
        await runtime.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
