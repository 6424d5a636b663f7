"""Run a hidden test in one machine, while the agent's code answers its calls in another machine.

The host relays plain data between the two programs, line by line, so neither process contains anything of the other.

The first line of stdin is a JSON object with "role". For role "calls", each further line is [module, name, args,
kwargs], and each line of stdout is its answer: ["value", v], ["function"] (args is null and the name is a function) or
["raise", builtin exception, text]. For role "test", the lines go the other way, each after the nonce; so do the
verdicts, ["passes"] or ["fails", text].

The test runs once as it is. If it passes, it runs again with every result changed: a real test must fail then. The
second run reuses the recorded results, so that the code cannot behave differently.
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
MAX_PLAIN_INT = 1 << 62


def pack(value, depth=0):
    """Convert a value to JSON data. It may contain only builtin types, no subclasses. Raises `TypeError` for anything
    else.

    `depth`: how deeply `value` is nested in the packed value.
    """
    kind = type(value)
    if kind in ATOMS or (kind is int and -MAX_PLAIN_INT < value < MAX_PLAIN_INT):
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
    """Convert the result of `pack` back to the value. With `spoil`, every number, text and length in it is changed."""
    if type(packed) is not dict:
        return spoiled(packed) if spoil else packed
    [(name, content)] = packed.items()
    if name == "int":
        return spoiled(int(content, 16)) if spoil else int(content, 16)
    if name == "complex":
        return complex(*content) - (17 if spoil else 0)
    if name == "bytes":
        return content.encode("latin-1") + (b"?" if spoil else b"")
    if name == "dict":
        return {**{unpack(k): unpack(v, spoil) for k, v in content}, **({"?": "?"} if spoil else {})}
    kind = {kind.__name__: kind for kind in MANY}[name]
    return kind([*(unpack(item, spoil) for item in content), *(["?"] if spoil else [])])


def spoiled(atom):
    """Return a value that differs from `atom` and has a similar type. `atom`: None, a bool, a number or a string."""
    if atom is None or type(atom) is bool:
        return not atom
    return atom + "?" if type(atom) is str else -atom - 17


def raised(error):
    """Return the answer for an exception: ["raise", name of its nearest builtin class, text]."""
    kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    return ["raise", kind.__name__, str(error)[:200]]


# ---- the agent's side


def answer(module, name, args, kwargs):
    """Call the function `name` of the agent's module, or look up the name only (`args` None). Returns an answer as
    defined at the top."""
    try:
        found = getattr(importlib.import_module(module), name)
        if args is None:
            return ["function"] if callable(found) else ["value", pack(found)]
        return ["value", pack(found(*unpack(args), **unpack(kwargs)))]
    except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is its answer
        return raised(error)


def serve_calls(lines, out):
    """Answer calls, one per line of `lines`, in lines written to `out`."""
    for line in lines:
        out.write(json.dumps(answer(*json.loads(line))).encode() + b"\n")
        out.flush()


# ---- the test's side


def rebuilt(kind, text):
    """Create an exception with this text, of the class `kind` or its nearest base class that accepts one text as
    argument."""
    for each in getattr(kind, "__mro__", ()):
        try:
            if issubclass(each, BaseException):
                return each(text)
        except TypeError:  # such as UnicodeDecodeError, which takes five arguments
            continue
    return RuntimeError(text)


class RemoteModules:
    """Calls functions of the agent's modules, which run in another machine, for the process that runs the test."""

    def __init__(self, lines, out, nonce, modules):
        self.lines, self.out, self.nonce, self.modules = lines, out, nonce, modules
        self.spoil, self.recorded, self.replay = False, [], iter(())

    def send(self, *args):
        self.out.write(f"{self.nonce} {json.dumps(args)}\n".encode())
        self.out.flush()

    def request(self, module, name, args, kwargs):
        """Call a function of a remote module and return its result, or raise its exception.

        With `args` None, return the module's attribute `name`: its value or, if it is a function, one that calls it
        in the other machine.
        """
        call = [module, name, *((None, None) if args is None else (pack(args), pack(kwargs)))]
        reply = self.answer_to(call)
        if reply[0] == "raise":
            raise rebuilt(getattr(builtins, reply[1], None), reply[2])
        if reply[0] == "function":
            return lambda *a, **k: self.request(module, name, a, k)
        return unpack(reply[1], self.spoil)

    def answer_to(self, call):
        """Return the answer to a call. In the first run of the test the call is sent; in the second run its recorded
        answer is returned."""
        key = json.dumps(call)
        before, reply = next(self.replay, ("", None))
        if before != key:
            self.replay = iter(())
            self.send("call", *call)
            reply = json.loads(self.lines.readline())
        if not self.spoil:
            self.recorded.append((key, reply))
        return reply

    def start_replay(self):
        self.spoil, self.replay = True, iter(self.recorded)


class Finder:
    """Import hook by which the test imports the agent's modules, as empty modules without code.

    Each attribute that the test reads from one is requested from the machine that runs the agent's code.
    """

    def __init__(self, names, remote):
        self.names, self.remote, self.made = names, remote, []  # modules that were imported

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def attribute(name):
            if name.startswith("__") or f"{spec.name}.{name}" in self.remote.modules:
                raise AttributeError(name)
            return self.remote.request(spec.name, name, None, None)

        vars(module)["__getattr__"] = attribute
        self.made.append(spec.name)
        return module

    def exec_module(self, module):
        """Do nothing: the module runs in the other machine."""


def run(test, remote, module, function):
    """Run the test on the remote function. Returns "" if it passes, else the reason why it fails."""
    try:
        space: dict = {"__name__": "hidden"}
        exec(compile(test, "<hidden>", "exec"), space)  # noqa: S102
        check = space["check"]
        check(lambda *a, **k: remote.request(module, function, a, k))
    except BaseException as error:  # noqa: BLE001 - however the test fails, it fails
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def serve_test(lines, out, request):
    """Run the test once as it is and, if it passes, once with changed results. Send a verdict for each run."""
    remote = RemoteModules(lines, out, request["nonce"], {*request["modules"], *request["more"]})
    first, last = (Finder(frozenset(request[names]), remote) for names in ("modules", "more"))
    sys.meta_path[:] = [first, *sys.meta_path, last]
    for spoil in (False, True):
        if spoil:
            remote.start_replay()
        if "random" in request["test"]:
            importlib.import_module("random").seed(request["nonce"])
        for name in (*request["modules"], *last.made):
            sys.modules.pop(name, None)
        why = run(request["test"], remote, request["module"], request["function"])
        remote.send("fails", why) if why else remote.send("passes")
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
