"""The commands ``etude plugins list`` and ``check``."""

from __future__ import annotations

import argparse

from etude.config import Plugin, overridden
from etude.errors import Exit, InputError, PluginRefused, nearest
from etude.plugins import KINDS, Kind, found, identity, import_path, make


def list_kinds(args: argparse.Namespace) -> int:
    """Print every kind of plug-in: its setting, the built-in choices, its protocol and contract suite. Returns 0."""
    for kind, facts in KINDS.items():
        print(f"{kind}: {facts.noun}")
        print(f"  setting    {facts.setting}")
        print(f"  built in   {', '.join(map(str, found(facts.built_in))) if facts.built_in else 'none'}")
        print(f"  protocol   {facts.protocol}")
        print(f"  contract   {facts.contract}")
    print('to use your own: write "my_package.module:Name" in the setting; see docs/guides/plugins.md')
    return Exit.DONE


def check(args: argparse.Namespace) -> int:
    """Run the contract suite on a plug-in. Returns exit code 1 if a test fails."""
    from etude.testing.contracts import results

    settings = overridden(args.set)
    if args.kind and args.kind not in KINDS:
        raise InputError(f"unknown kind of plug-in {args.kind!r}", hint=nearest(args.kind, KINDS))
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
    """The only kind whose protocol a plug-in implements. Raises `PluginRefused`."""
    for kind in KINDS:
        if import_path(kind, path) != path:
            return kind  # built in
    fits = []
    for kind, facts in KINDS.items():
        try:
            make(kind, Plugin(path, settings), where=path)
        except PluginRefused as error:
            if not error.what.endswith(f"is not a {facts.noun}"):
                raise
            continue
        fits.append(kind)
    if len(fits) == 1:
        return fits[0]
    what = f"{path} could be {' or '.join(fits)}" if fits else f"{path} is not a plug-in"
    known = f"the kinds are {', '.join(KINDS)}"
    hint = "choose one: --kind KIND" if fits else "give --kind KIND to see what is missing for that kind"
    raise PluginRefused(what, known, hint=hint)
