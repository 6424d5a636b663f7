"""Configs: TOML and overrides become frozen dataclasses, or an error that names the place."""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import build, load, ranged, to_plain, to_toml
from etude.errors import ConfigError, ConfigErrors


class Kind(enum.StrEnum):
    FAST = "fast"
    BEST = "best"


@dataclass(frozen=True)
class Inner:
    steps: int = ranged(3, low=1, high=9)
    rate: float = ranged(0.5, low=0.0)
    kind: Kind = Kind.FAST
    names: tuple[str, ...] = ("a",)
    share: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.5

    def __post_init__(self) -> None:
        if self.rate > self.steps:
            raise ValueError(f"rate = {self.rate} is over steps = {self.steps}")


@dataclass(frozen=True)
class Outer:
    seed: int = 0
    start: Path | None = None
    exact: bool = False
    free: float = 0.0
    many: tuple[float, ...] = ()
    inner: Inner = field(default_factory=Inner)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_omitted_settings_have_their_default_and_overrides_win(tmp_path):
    path = written(tmp_path, "seed = 4\n[inner]\nsteps = 2\n")
    config = load(path, Outer, ["inner.steps=7", "inner.kind=best", "start=/x/y", 'inner.names=["p", "q"]'])
    assert config == Outer(seed=4, start=Path("/x/y"), inner=Inner(steps=7, kind=Kind.BEST, names=("p", "q")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sede = 1", "unknown key 'sede'\n  hint: did you mean 'seed'?"),
        ("[inner]\nstpes = 1", "unknown key 'inner.stpes'\n  hint: did you mean 'inner.steps'?"),
        ("[inner]\nrate = nan", "inner.rate = nan is not a finite number\n  hint: it must be at least 0.0"),
        ("[inner]\nrate = inf", "inner.rate = inf is not a finite number\n  hint: it must be at least 0.0"),
        (f"[inner]\nrate = 1{'0' * 400}", "inner.rate = inf is not a finite number"),
        ("free = -inf", "free = -inf is not a finite number\n  hint: it must be a finite number"),
        ("many = [1.0, nan]", "many[1] = nan is not a finite number"),
        ("seed = 'x'", 'seed: expected an integer, got "x"'),
        ("seed = 1.5", "seed: expected an integer, got 1.5"),
        ("seed = true", "seed: expected an integer, got true"),
        ("exact = 1", "exact: expected true or false, got 1"),
        ("inner = 3", "inner: expected a section, got 3"),
        ("[inner]\nsteps = 0", "inner.steps = 0 is out of range\n  hint: it must be from 1 to 9"),
        (
            "[inner]\nshare = -1",
            "inner.share = -1.0 is out of range\n  hint: it must be more than 0.0 and less than 1.0",
        ),
        ("[inner]\nrate = -1", "inner.rate = -1.0 is out of range\n  hint: it must be at least 0.0"),
        ("[inner]\nkind = 'bets'", "inner.kind = 'bets' is unknown\n  hint: did you mean 'best'?"),
        ("[inner]\nnames = 'a'", 'inner.names: expected a list, got "a"'),
        ("[inner]\nsteps = 1\nrate = 2", "rate = 2.0 is over steps = 1"),
        ("[inner]\nrate = 'fast'", 'inner.rate: expected a number, got "fast"'),
        ("[seed]\nx = 1", "seed: expected an integer, got the section {'x': 1}"),
        ("start = 3", "start: expected a path, got 3"),
        ("seed = 2026-01-01", "seed: expected an integer, got"),
        ("[inner]\nzzz = 1", "known: inner.kind, inner.names, inner.rate, inner.share, inner.steps"),
        ("seed = ", "is not valid TOML"),
        ("[inner", "(at end of document)\n  hint: look at the last lines for a bracket or quotation mark"),
        ("seed = = 1", "(at line 1, column 8)\n  hint: fix the line that the error names"),
    ],
)
def test_bad_input_is_named_with_its_place_and_a_hint(tmp_path, text, says):
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, text), Outer)
    assert says in str(error.value)
    assert "hint:" in str(error.value)


def test_an_error_of_the_whole_config_names_no_section():
    with pytest.raises(ConfigError, match=r"^the config is invalid: rate = 2\.0 is over"):
        build(Inner, {"steps": 1, "rate": 2.0})


def test_all_errors_of_a_config_are_reported_at_once_with_their_number(tmp_path):
    text = "sede = 1\nseed = 'x'\nmany = [nan, 1.0, 'y']\n[inner]\nsteps = 0\nstpes = 2\nrate = 5"
    with pytest.raises(ConfigErrors) as error:
        load(written(tmp_path, text), Outer)
    whats = [one.what for one in error.value.errors]
    assert whats == [
        "unknown key 'sede'",
        "seed",
        "many[0] = nan is not a finite number",
        "many[2]",
        "inner.steps = 0 is out of range",
        "unknown key 'inner.stpes'",
    ]
    said = str(error.value)
    assert said.startswith(
        "the config has 6 errors:\n  1. unknown key 'sede'\n     hint: did you mean 'seed'?\n  2. seed:"
    )
    assert said.count("hint:") == 7
    assert str(pickle.loads(pickle.dumps(error.value))) == said


@pytest.mark.parametrize("override", ["seed", "=3", "seed.x=3", "inner=3"])
def test_a_malformed_override_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match="hint:"):
        load(written(tmp_path, "seed = 1"), Outer, [override])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no config at"):
        load(tmp_path / "nothing.toml", Outer)


texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")) | st.sampled_from('"\\\n\t'), max_size=12)


@given(
    seed=st.integers(-(2**62), 2**62), steps=st.integers(1, 9), names=st.lists(texts, max_size=3), exact=st.booleans()
)
def test_the_effective_config_reads_back_equal(tmp_path_factory, seed, steps, names, exact):
    config = Outer(seed=seed, exact=exact, inner=Inner(steps=steps, names=tuple(names)))
    path = tmp_path_factory.mktemp("c") / "config.toml"
    path.write_text(to_toml(config))
    assert load(path, Outer) == config
    assert build(Outer, to_plain(config)) == config
