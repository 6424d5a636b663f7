"""``etude plugins list | check``."""

from __future__ import annotations

import argparse

from etude.config import Plugin, overridden
from etude.errors import Exit, InputError, PluginRefused, nearest
from etude.plugins import KINDS, Kind, found, identity, import_path, make


def listed(args: argparse.Namespace) -> int:
    """Every kind of plug-in: the setting that names it, its protocol, and what etude has itself."""
    for kind, facts in KINDS.items():
        print(f"{kind}: {facts.noun}")
        print(f"  setting    {facts.setting}")
        print(f"  built in   {', '.join(map(str, found(facts.built_in))) if facts.built_in else 'none'}")
        print(f"  protocol   {facts.protocol}")
        print(f"  contract   {facts.contract}")
    print(
        'yours: "my_package.module:Name" in the setting; examples are in examples/plugins, see docs/guides/plugins.md'
    )
    return Exit.DONE


def check(args: argparse.Namespace) -> int:
    """Run the contract suite on a user's class. The exit code is 1 where a promise is broken."""
    from etude.testing.contracts import results

    settings = overridden(args.set)
    if args.kind and args.kind not in KINDS:
        raise InputError(f"no kind of plug-in is called {args.kind!r}", hint=nearest(args.kind, KINDS))
    kind = Kind(args.kind) if args.kind else _kind_of(args.path, settings)
    plugin = Plugin(args.path, settings)
    make(kind, plugin)
    print(f"{kind.noun} {identity(kind, args.path)}")
    passed = total = 0
    for promise, broken in results(found(KINDS[kind].contract), lambda: make(kind, plugin)):
        total, passed = total + 1, passed + (not broken)
        print(f"  FAILED  {promise}: {broken}" if broken else f"  ok      {promise}")
    print(f"{passed} of {total} passed")
    return Exit.DONE if passed == total else Exit.FAILED


def _kind_of(path: str, settings: dict[str, object]) -> Kind:
    """The one kind whose protocol a plug-in has. Raises `PluginRefused`."""
    for kind in KINDS:
        if import_path(kind, path) != path:
            return kind  # built in
    fits = []
    for kind, facts in KINDS.items():
        try:
            make(kind, Plugin(path, settings))
        except PluginRefused as error:
            if not error.what.endswith(f"is no {facts.noun}"):
                raise
            continue
        fits.append(kind)
    if len(fits) == 1:
        return fits[0]
    what = f"{path} fits {' and '.join(fits)}" if fits else f"{path} is no plug-in"
    known = f"the kinds are {', '.join(KINDS)}"
    hint = "name one: --kind KIND" if fits else "give --kind KIND to see what its protocol asks for"
    raise PluginRefused(what, known, hint=hint)
