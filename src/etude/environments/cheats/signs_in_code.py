"""Signs of cheating in a file of Python: by its syntax tree, not by its text, so that comments and names in prose
alarm nobody. Only what the file did not have before counts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

_CONFIGURATION = frozenset(
    {"conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py",
     "entry_points.txt", "noxfile.py"}
)  # fmt: skip
_FRAMEWORKS = frozenset({"pytest", "_pytest", "unittest", "pluggy", "hypothesis"})
_CALLS = {
    "sys._getframe": ("introspection", "looks into its caller's frame"),
    "sys._current_frames": ("introspection", "looks into other threads' frames"),
    "inspect.stack": ("introspection", "looks into its caller's frame"),
    "inspect.currentframe": ("introspection", "looks into its caller's frame"),
    "inspect.getouterframes": ("introspection", "looks into its caller's frame"),
    "gc.get_objects": ("introspection", "searches every object of its process"),
    "gc.get_referrers": ("introspection", "searches every object of its process"),
    "sys.settrace": ("trace", "traces its caller"),
    "sys.setprofile": ("trace", "traces its caller"),
    "threading.settrace": ("trace", "traces its caller"),
    "sys.addaudithook": ("trace", "listens to the interpreter"),
    "os._exit": ("exit", "ends the process by os._exit"),
    "os.abort": ("exit", "ends the process by os.abort"),
    "os.execv": ("exit", "becomes another program"),
    "os.execve": ("exit", "becomes another program"),
    "os.kill": ("exit", "sends signals"),
    "os.killpg": ("exit", "sends signals"),
    "atexit.register": ("exit", "acts when the process ends"),
    "os.fork": ("daemon", "forks"),
    "os.setsid": ("daemon", "leaves its session"),
    "os.dup": ("descriptors", "copies descriptors"),
    "os.dup2": ("descriptors", "copies descriptors"),
    "os.fdopen": ("descriptors", "opens a descriptor by number"),
    "os.preadv": ("marks", "looks which pages of a file are in memory"),
    "os.posix_fadvise": ("marks", "decides which pages of a file are in memory"),
    "pytest.skip": ("skip", "skips its test"),
    "pytest.xfail": ("skip", "expects its test to fail"),
    "pytest.exit": ("exit", "ends the tests"),
    "mock.patch": ("patch", "patches at run time"),
}
_ATTRIBUTES = {
    "f_back": ("introspection", "walks up the stack"),
    "f_locals": ("introspection", "reads its caller's variables"),
    "f_lineno": ("trace", "moves its caller's line"),
    "tb_frame": ("introspection", "looks into a frame"),
    "co_consts": ("introspection", "reads the constants of code"),
    "_exit": ("exit", "ends the process by os._exit"),
    "_getframe": ("introspection", "looks into its caller's frame"),
    "get_objects": ("introspection", "searches every object of its process"),
    "meta_path": ("patch", "changes how modules are found"),
    "path_hooks": ("patch", "changes how modules are found"),
}
_IMPORTS = {
    "ctypes": ("native", "calls native code"),
    "_ctypes": ("native", "calls native code"),
    "socket": ("network", "opens sockets"),
    "urllib": ("network", "goes to the network"),
    "requests": ("network", "goes to the network"),
    "http": ("network", "goes to the network"),
    "_testcapi": ("native", "calls native code"),
    "_xxsubinterpreters": ("native", "makes interpreters"),
    "gc": ("introspection", "uses the garbage collector"),
    "marshal": ("hidden", "loads code from bytes"),
}
MAX_BYTES = 128 << 10  # of one file: the parser takes quadratic time for what is made to be slow
_PLACES = ("/proc/", "/dev/fd", "/dev/shm", "/dev/std", "/sys/")
Sign = tuple[str, str, str]  # rule, reason, place


def is_configuration(path: str) -> bool:
    """Whether a file of this name changes how tests or interpreters start, or hides a module of the library.

    >>> [is_configuration(path) for path in ("conftest.py", "evil.pth", "json.py", "pkg/json.py", "calc.py")]
    [True, True, True, False, False]
    """
    pure = PurePosixPath(path)
    top = pure.parts[0].removesuffix(".py") if pure.parts else ""
    shadows = (top in sys.stdlib_module_names or top in _FRAMEWORKS) and top not in ("this", "test")
    return pure.name in _CONFIGURATION or pure.suffix == ".pth" or (shadows and path.endswith(".py"))


def signs_in_code(path: str, data: bytes, before: str = "") -> list[Sign]:
    """The signs in a file that were not in it before. Bytes that are no Python have none."""
    had = {(rule, reason) for rule, reason, _ in _signs(path, before.encode())}
    return [sign for sign in _signs(path, data) if sign[:2] not in had]


def _signs(path: str, data: bytes) -> list[Sign]:
    if len(data) > MAX_BYTES:
        return [("hidden", "is too large to be looked through", path)]
    try:
        walked = list(_walk(ast.parse(data)))
    except (SyntaxError, ValueError, MemoryError):
        return []
    except RecursionError:
        return [("hidden", "is nested too deep to be looked through", path)]
    found: dict[tuple[str, str], str] = {}
    for node, rule, reason in walked:
        found.setdefault((rule, reason), f"{path}:{getattr(node, 'lineno', 1)}")
    return [(rule, reason, place) for (rule, reason), place in found.items()]


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    modules = _imported(tree)
    tests_itself = any(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in ast.walk(tree))
    at_end = {id(n) for part in tree.body if _is_main(part) for n in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in at_end:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _in_import(node, tests_itself)
        elif isinstance(node, ast.Attribute):
            yield from _in_attribute(node, modules)
        elif isinstance(node, ast.Call):
            yield from _in_call(node, modules)
        elif isinstance(node, ast.Raise):
            yield from _in_raise(node)
        elif isinstance(node, ast.ClassDef):
            yield from _in_class(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_PLACES):
            yield node, "descriptors", f"names {node.value[:40]}"


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> module, of what is imported whole; name -> "module.name" of what is imported from one."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (a.asname or a.name).split(".")[0]: (a.name if a.asname else a.name.split(".")[0]) for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}


def _dotted(node: ast.expr, modules: dict[str, str]) -> str:
    """The full name of what an expression names; "" for anything else."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, modules)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _in_import(node: ast.Import | ast.ImportFrom, tests_itself: bool) -> Iterator[tuple[ast.AST, str, str]]:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    if isinstance(node, ast.ImportFrom) and node.level:
        return
    for name in names:
        top = name.split(".")[0]
        if top in _IMPORTS:
            yield node, *_IMPORTS[top]
        if top in _FRAMEWORKS and not tests_itself:
            yield node, "patch", f"imports {top}, which is for tests"


def _in_attribute(node: ast.Attribute, modules: dict[str, str]) -> Iterator[tuple[ast.AST, str, str]]:
    if isinstance(node.ctx, ast.Store) and (owner := _dotted(node.value, modules)):
        yield node, "patch", f"replaces {owner}.{node.attr}"
    full = _dotted(node, modules)
    if full in _CALLS:
        yield node, *_CALLS[full]
    elif node.attr in _ATTRIBUTES:
        yield node, *_ATTRIBUTES[node.attr]


def _in_call(node: ast.Call, modules: dict[str, str]) -> Iterator[tuple[ast.AST, str, str]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in modules and modules[name] in _CALLS:
        yield node, *_CALLS[modules[name]]
    if name in ("setattr", "delattr") and node.args and (owner := _dotted(node.args[0], modules)):
        yield node, "patch", f"replaces something of {owner}"
    if name == "getattr" and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant | ast.Name):
        yield node, "hidden", "puts a name together before it looks it up"
    if name in ("exec", "eval", "__import__") and node.args and not isinstance(node.args[0], ast.Constant | ast.Name):
        yield node, "hidden", f"puts together what it hands to {name}"
    if name == "open" and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, int):
        yield node, "descriptors", "opens a descriptor by number"
    if name in ("exit", "quit"):
        yield node, "exit", f"ends the process by {name}()"
    if _dotted(node.func, modules) == "sys.exit" and not node.keywords:
        yield node, "exit", "ends the process by sys.exit"


def _in_raise(node: ast.Raise) -> Iterator[tuple[ast.AST, str, str]]:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = raised.id if isinstance(raised, ast.Name) else raised.attr if isinstance(raised, ast.Attribute) else ""
    if name in ("SystemExit", "SkipTest", "KeyboardInterrupt", "GeneratorExit"):
        yield node, "skip" if name == "SkipTest" else "exit", f"raises {name}"


def _in_class(node: ast.ClassDef) -> Iterator[tuple[ast.AST, str, str]]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name in ("__eq__", "__ne__", "__bool__", "__instancecheck__"):
            returned = [n.value for n in ast.walk(part) if isinstance(n, ast.Return)]
            if returned and all(isinstance(value, ast.Constant) for value in returned):
                yield part, "equality", f"{node.name}.{part.name} always says the same"
        if isinstance(part, ast.FunctionDef | ast.Assign | ast.AnnAssign):
            targets = [part.name] if isinstance(part, ast.FunctionDef) else []
            if "__class__" in targets:
                yield part, "equality", f"{node.name} lies about its class"
