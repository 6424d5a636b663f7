"""In two machines: the hidden test calls functions in one, the agent's code answers in the other; the host carries
plain data between them, line by line. So neither process holds anything of the other's.

First line of stdin: {"role", ...}. As "calls", each further line is [module, name, args, kwargs] and each line of
stdout its answer: ["value", v], ["function"] (args null, and the name is one) or ["raise", builtin exception, text].
As "test", lines go the other way, each after the nonce; so do the verdicts, ["passes"] or ["fails", text].
The test runs once as it is and, if it passes, once with every result spoiled: then a test that is one must fail. It is
told the same results again, so that nobody can behave once and not again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics

import builtins
import importlib
import importlib.machinery
import json
import os
import sys
import types

ATOMS = (type(None), bool, float, str)
MANY = (list, tuple, set, frozenset)
WORD = 1 << 62


def pack(value, depth=0):
    """Plain data of exactly the builtin types as JSON. `TypeError` for anything else."""
    kind = type(value)
    if kind in ATOMS or (kind is int and -WORD < value < WORD):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.decode("latin-1")}
    if depth < 64 and kind in MANY:
        return {kind.__name__: [pack(item, depth + 1) for item in value]}
    if depth < 64 and kind is dict:
        return {"dict": [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(f"returned a {kind.__name__}, which is not plain data")


def unpack(packed, spoil=False):
    """What was packed; with `spoil`, every atom and length another."""
    if type(packed) is not dict:
        return spoiled(packed) if spoil else packed
    [(name, held)] = packed.items()
    if name == "int":
        return spoiled(int(held, 16)) if spoil else int(held, 16)
    if name == "complex":
        return complex(*held) - (17 if spoil else 0)
    if name == "bytes":
        return held.encode("latin-1") + (b"?" if spoil else b"")
    if name == "dict":
        return {**{unpack(k): unpack(v, spoil) for k, v in held}, **({"?": "?"} if spoil else {})}
    kind = {kind.__name__: kind for kind in MANY}[name]
    return kind([*(unpack(item, spoil) for item in held), *(["?"] if spoil else [])])


def spoiled(atom):
    if atom is None or type(atom) is bool:
        return not atom
    return atom + "?" if type(atom) is str else -atom - 17


def raised(error):
    kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    return ["raise", kind.__name__, str(error)[:200]]


# ---- the agent's side


def answer(module, name, args, kwargs):
    try:
        found = getattr(importlib.import_module(module), name)
        if args is None:
            return ["function"] if callable(found) else ["value", pack(found)]
        return ["value", pack(found(*unpack(args), **unpack(kwargs)))]
    except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is its answer
        return raised(error)


def serve_calls(lines, out):
    for line in lines:
        out.write(json.dumps(answer(*json.loads(line))).encode() + b"\n")
        out.flush()


# ---- the test's side


def rebuilt(kind, text):
    """An error of this kind, or of the nearest that text alone makes."""
    for each in getattr(kind, "__mro__", ()):
        try:
            if issubclass(each, BaseException):
                return each(text)
        except TypeError:  # such as UnicodeDecodeError, of five arguments
            continue
    return RuntimeError(text)


class Elsewhere:
    """The agent's modules, as far as this process can know them."""

    def __init__(self, lines, out, nonce, modules):
        self.lines, self.out, self.nonce, self.modules = lines, out, nonce, modules
        self.spoil, self.told, self.again = False, [], iter(())

    def tell(self, *words):
        self.out.write(f"{self.nonce} {json.dumps(words)}\n".encode())
        self.out.flush()

    def ask(self, module, name, args, kwargs):
        question = [module, name, *((None, None) if args is None else (pack(args), pack(kwargs)))]
        said = self.said(question)
        if said[0] == "raise":
            raise rebuilt(getattr(builtins, said[1], None), said[2])
        if said[0] == "function":
            return lambda *a, **k: self.ask(module, name, a, k)
        return unpack(said[1], self.spoil)

    def said(self, question):
        """What was said to it the first time; else it is asked."""
        key = json.dumps(question)
        before, said = next(self.again, ("", None))
        if before != key:
            self.again = iter(())
            self.tell("call", *question)
            said = json.loads(self.lines.readline())
        if not self.spoil:
            self.told.append((key, said))
        return said

    def go_again(self):
        self.spoil, self.again = True, iter(self.told)


class Finder:
    """Finds the agent's modules elsewhere."""

    def __init__(self, names, elsewhere):
        self.names, self.elsewhere, self.made = names, elsewhere, []  # modules that it made

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def attribute(name):
            if name.startswith("__") or f"{spec.name}.{name}" in self.elsewhere.modules:
                raise AttributeError(name)
            return self.elsewhere.ask(spec.name, name, None, None)

        vars(module)["__getattr__"] = attribute
        self.made.append(spec.name)
        return module

    def exec_module(self, module):
        """There is nothing to execute: it runs elsewhere."""


def run(test, elsewhere, module, function):
    """ "" if the test passes, else why not."""
    try:
        space: dict = {"__name__": "hidden"}
        exec(compile(test, "<hidden>", "exec"), space)  # noqa: S102
        check = space["check"]
        check(lambda *a, **k: elsewhere.ask(module, function, a, k))
    except BaseException as error:  # noqa: BLE001 - however the test fails, it fails
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def serve_test(lines, out, request):
    elsewhere = Elsewhere(lines, out, request["nonce"], {*request["modules"], *request["more"]})
    first, last = (Finder(frozenset(request[names]), elsewhere) for names in ("modules", "more"))
    sys.meta_path[:] = [first, *sys.meta_path, last]
    for spoil in (False, True):
        if spoil:
            elsewhere.go_again()
        if "random" in request["test"]:
            importlib.import_module("random").seed(request["nonce"])
        for name in (*request["modules"], *last.made):
            sys.modules.pop(name, None)
        why = run(request["test"], elsewhere, request["module"], request["function"])
        elsewhere.tell("fails", why) if why else elsewhere.tell("passes")
        if why:
            return


def main():
    lines, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    request = json.loads(lines.readline())
    try:
        serve_calls(lines, out) if request["role"] == "calls" else serve_test(lines, out, request)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
