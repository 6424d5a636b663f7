"""In a machine: run the hidden test against the agent's function and report whether it passed.

stdin: {"nonce", "module", "function", "test", "spoil"}; stdout: one line, the nonce and true, or why not. What the
function returns is rebuilt as plain data, so that no clever object meets the test. With "spoil" every result is made
wrong, and a test that is one must fail.
"""

import copy
import importlib
import json
import os
import sys

ATOMS = (type(None), bool, int, float, complex, str, bytes)


def rebuilt(value: object, change: bool) -> object:
    """The same value made of exactly the builtin types; with `change`, every atom and length another."""
    kind = type(value)
    if kind in ATOMS:
        return spoiled(value) if change else value
    if kind in (list, tuple, set, frozenset):
        items = [rebuilt(item, change) for item in value]  # type: ignore[attr-defined]
        return kind([*items, "?"] if change else items)
    if kind is dict:
        pairs = {rebuilt(k, False): rebuilt(v, change) for k, v in value.items()}  # type: ignore[attr-defined]
        return {**pairs, "?": "?"} if change else pairs
    raise TypeError(f"returned a {kind.__name__}, which is not plain data")


def spoiled(atom: object) -> object:
    if atom is None or type(atom) is bool:
        return not atom
    if type(atom) is str:
        return atom + "?"
    return atom + b"?" if type(atom) is bytes else -atom - 17  # type: ignore[operator]


def main() -> None:
    request = json.load(sys.stdin)
    report = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    verdict: object = "the hidden test did not run"
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        space: dict[str, object] = {"__name__": "hidden"}
        exec(compile(request["test"], "<hidden>", "exec"), space)  # noqa: S102
        check = space["check"]
        check(lambda *a, **k: rebuilt(function(*copy.deepcopy(a), **copy.deepcopy(k)), request["spoil"]))  # type: ignore[operator]
        verdict = True
    except BaseException as error:  # noqa: BLE001 - however the test fails, it fails
        verdict = f"{type(error).__name__}: {error}"[:200]
    with open(report, "w") as file:
        file.write(f"\n{request['nonce']} {json.dumps(verdict)}\n")
        file.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
