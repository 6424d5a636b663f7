"""Python is parsed in several threads at once, and only in one place."""

from __future__ import annotations

import ast
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.syntax import literal, parse

SOURCE = Path(__file__).parents[2] / "src" / "etude"


@pytest.fixture
def restless():
    """Threads change places at every chance, and garbage is collected often."""

    def collected(phase: str, info: dict[str, int]) -> None:
        for _ in range(50):
            pass

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def test_threads_that_parse_at_once_do_not_disturb_one_another(restless):
    source = "def f(n):\n    return [n, {n: (n + 1) * 2}]\n" * 200
    want = ast.dump(parse(source))
    with ThreadPoolExecutor(4) as threads:
        trees = list(threads.map(parse, [source] * 120))
    assert {ast.dump(tree) for tree in trees[::40]} == {want}


@pytest.mark.parametrize("source", ["def", "a\0b", "(" * 500 + ")" * 500, b"\xff\xfe", "-" * 100_000 + "1"])
def test_invalid_python_is_one_kind_of_error(source):
    with pytest.raises(SyntaxError):
        parse(source)


@pytest.mark.parametrize("text", ["", "f()", "1; 2", "x = 1", "{[]: 1}", "1 + 'a'"])
def test_an_invalid_literal_is_one_kind_of_error(text):
    with pytest.raises(SyntaxError):
        literal(text)


def test_only_the_syntax_module_parses_python():
    calls = {
        path.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "ast.parse"
    }
    assert calls == {"syntax.py"}
