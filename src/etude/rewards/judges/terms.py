"""Reward terms that ask a language model as a judge: the built-in kind "judge" of `[[rewards.terms]]`."""

from __future__ import annotations

import asyncio
import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from etude.errors import ConfigError
from etude.prices import UNKNOWN, read_prices
from etude.records.reward import Score
from etude.records.rollout import Graded, Rollout
from etude.rewards.judges.asking import Dialect, HttpAsker
from etude.rewards.judges.evidence import OF_ROLLOUTS, Evidence, Section
from etude.rewards.judges.judge import Judge, Limits, Verdict
from etude.rewards.judges.rubrics import Aspect, read_rubric
from etude.rewards.judges.store import JudgeStore
from etude.rewards.judges.verdicts import Form

MAX_DEADLINE_S = 540.0  # below that of `measuring`, which ends the run
EVIDENCE_CHARS = 2_000
_OWN_FIELDS = {"messages", "model", "n", "stream", "system"}  # of a request's body
Positive = Annotated[int | None, msgspec.Meta(ge=1)]


class Mode(enum.StrEnum):
    """What a judge is asked about the rollouts of a group.

    POINTWISE: the score of each rollout. PAIRWISE: for each pair, which rollout is better, asked in both orders.
    RANKING: the order of all rollouts, asked in two orders of presentation."""

    POINTWISE = "pointwise"
    PAIRWISE = "pairwise"
    RANKING = "ranking"


@dataclass
class _JudgeTerm:
    """The common part of terms that ask a judge. The value is from 0 to 1."""

    judge: Judge
    mode: Mode
    sections: tuple[Section, ...]
    readable: Callable[[Iterable[int]], str] | None = field(default=None, init=False)

    @property
    def version(self) -> str:
        """The version of the judge with the mode and the kinds of evidence."""
        return "-".join([self.judge.version, self.mode, *self.sections])

    def enter(self, folder: Path, readable: Callable[[Iterable[int]], str]) -> None:
        """Use the run's tokeniser for traces, and count money for this run."""
        self.readable = readable
        self.judge.account = f"{self.judge.account}, {folder.name}"

    def evidence(self, rollout: Rollout, graded: Graded) -> Evidence:
        """Return what the judge sees of a rollout."""
        return Evidence.of_rollout(rollout, graded, self.sections, readable=self.readable)

    def _score(self, verdicts: Mapping[str, Verdict], known: Mapping[str, float]) -> Score:
        """Compose the score from the verdicts by aspect. `known`: their values."""
        words = {name: f"{name} {_shown(one.value)}: {one.reason}" for name, one in verdicts.items()}
        unknown = [name for name, one in verdicts.items() if one.value is None]
        if unknown:
            retry = all(verdicts[name].retry for name in unknown)
            return Score(value=None, evidence="; ".join(words[name] for name in unknown), retry=retry)
        evidence = "; ".join(text[: EVIDENCE_CHARS // len(words)] for text in words.values())
        return Score(value=self.judge.rubric.value(known), evidence=evidence)


@dataclass
class JudgeTerm(_JudgeTerm):
    """A `RewardTerm` that asks a judge for the score of each rollout."""

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return await self._of_work(await asyncio.to_thread(self.evidence, rollout, graded))

    async def scores(self, works: Sequence[Evidence]) -> Sequence[Score]:
        """Return the score of each work."""
        return await asyncio.gather(*map(self._of_work, works))

    async def _of_work(self, work: Evidence) -> Score:
        aspects = self.judge.rubric.aspects
        found = await asyncio.gather(*(self.judge.score(aspect, work) for aspect in aspects))
        verdicts = {aspect.name: one for aspect, one in zip(aspects, found, strict=True)}
        return self._score(verdicts, {name: one.value for name, one in verdicts.items() if one.value is not None})


@dataclass
class GroupJudgeTerm(_JudgeTerm):
    """A `GroupRewardTerm` that asks a judge to compare the rollouts of a group with each other.

    The value is the share of siblings that a rollout is better than: 0.5 for a rollout by itself."""

    async def score_group(self, rollouts: Sequence[Rollout], graded: Sequence[Graded]) -> Sequence[Score]:
        return await self.scores(
            [await asyncio.to_thread(self.evidence, *one) for one in zip(rollouts, graded, strict=True)]
        )

    async def scores(self, works: Sequence[Evidence]) -> Sequence[Score]:
        """Return the score of each work among all of them."""
        aspects = self.judge.rubric.aspects
        compare = self._by_pairs if self.mode is Mode.PAIRWISE else self.judge.rank
        found = await asyncio.gather(*(compare(aspect, works) for aspect in aspects))
        scores = list[Score]()
        for i in range(len(works)):
            verdicts = {aspect.name: one[i] for aspect, one in zip(aspects, found, strict=True)}
            known = {
                aspect.name: aspect.lowest + verdicts[aspect.name].value * (aspect.highest - aspect.lowest)
                for aspect in aspects
                if verdicts[aspect.name].value is not None
            }
            scores.append(self._score(verdicts, known))
        return scores

    async def _by_pairs(self, aspect: Aspect, works: Sequence[Evidence]) -> list[Verdict]:
        """Compare all pairs of distinct works. A pair without a verdict makes both of its works unknown."""
        distinct = sorted({work.digest: work for work in works}.items())
        pairs = [(a, b) for at, (a, _) in enumerate(distinct) for b, _ in distinct[at + 1 :]]
        by_digest = dict(distinct)
        answers = await asyncio.gather(*(self.judge.compare(aspect, by_digest[a], by_digest[b]) for a, b in pairs))
        shares: dict[str, list[Verdict]] = {digest: [] for digest in by_digest}
        for (a, b), answer in zip(pairs, answers, strict=True):
            shares[a].append(answer)
            shares[b].append(answer if answer.value is None else Verdict(1.0 - answer.value, answer.reason))
        return [_mean(shares[work.digest]) for work in works]


def _mean(verdicts: Sequence[Verdict]) -> Verdict:
    unknown = next((one for one in verdicts if one.value is None), None)
    if unknown is not None:
        return unknown
    if not verdicts:
        return Verdict(0.5, "all have the same evidence")
    value = sum(one.value for one in verdicts) / len(verdicts)
    return Verdict(value, f"better than {value:.0%} of {len(verdicts)}; {verdicts[0].reason}")


def _shown(value: object) -> str:
    return "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def judge(
    rubric: Path,
    url: str,
    model: str,
    *,
    dialect: Dialect = Dialect.OPENAI,
    key_env: str = "",
    mode: Mode = Mode.POINTWISE,
    form: Form = Form.JSON,
    tuned: bool = False,
    evidence: tuple[Section, ...] = OF_ROLLOUTS,
    evidence_chars: Annotated[int, msgspec.Meta(ge=200, le=2_000_000)] = 24_000,
    hide: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    prices: Path | None = None,
    budget: Annotated[float | None, msgspec.Meta(ge=0.0)] = None,
    at_once: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8,
    per_minute: Positive = None,
    deadline_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_DEADLINE_S)] = 120.0,
    cache: Path = Path("judges.sqlite"),
) -> JudgeTerm | GroupJudgeTerm:
    """Make a reward term that asks the model `model` at `url` about the aspects of a rubric.

    - `rubric`: the path of a rubric (`rubrics`).
    - `url`: the base URL of the API, as the vendor's SDK takes it.
    - `key_env`: the name of the environment variable that has the API key; "" for none.
    - `form`: the form of the answers. `line` is for servers that do not follow JSON schemas; `token` reads the
      probabilities of one token, and needs OpenAI's dialect and the pointwise mode.
    - `tuned`: whether the model was trained on these questions (`etude judge tune`); needs the form `token`.
    - `evidence`, `evidence_chars`: what the judge sees, and how many characters of it in one question.
    - `hide`: names of models and people that are replaced in the evidence.
    - `options`: further fields of the request's body; None: temperature 0. Reasoning models may refuse a temperature.
    - `prices`: the path of a table of prices (`etude.prices`), which must have the prices of `model` if there is a
      `budget`: the most dollars that the calls of one run may cost.
    - `at_once`: the most questions at the same time in one process. `per_minute`: the most calls per minute of all
      processes with this `cache`; None: no limit. `deadline_s`: seconds for one question with all its tries, from when
      it is one of the `at_once`.
    - `cache`: the file with the verdicts so far. It may be shared by runs and by `etude judge calibrate`.

    Raises `ConfigError` for invalid settings, a rubric that cannot be read, or an API key that is not set."""
    host, key = _service(url, model, key_env)
    _check_questions(form, dialect, mode, evidence, options or {})
    if not os.access(cache.absolute().parent, os.W_OK):
        facts = f"{cache.absolute().parent} does not exist, or is not writable"
        hint = "create the folder, or give another path"
        raise ConfigError(f"cache = {str(cache)!r} cannot be created", facts, hint=hint)
    table = read_prices(prices).tokens(model) if prices is not None else UNKNOWN
    if budget is not None and table.cost(1, 0, 1) is None:
        facts = f"the prices of {model!r} are unknown, so the cost of its calls is too"
        hint = f'give prices = "prices.toml" with [models."{model}"], input and output'
        raise ConfigError(f"budget = {budget:g} cannot be kept", facts, hint=hint)
    limits = Limits(at_once, per_minute, deadline_s, budget, evidence_chars)
    asked = Judge(
        read_rubric(rubric),
        HttpAsker(url, model, dialect, key, {"temperature": 0.0} if options is None else options),
        JudgeStore(cache),
        form=form,
        limits=limits,
        hide=hide,
        prices=table,
        account=f"{rubric.stem} by {model} at {host}",
        tuned=tuned,
    )
    return (JudgeTerm if mode is Mode.POINTWISE else GroupJudgeTerm)(asked, mode, evidence)


def _service(url: str, model: str, key_env: str) -> tuple[str, str]:
    """Return the host and the API key of a model's server. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
    except ValueError:  # e.g. a bracket of an IPv6 address is missing
        parts = urlsplit("")
    odd = "@" in parts.netloc or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or odd:
        shown = f"{parts.scheme}://{parts.hostname}..." if odd else url  # the rest may have a key
        hint = 'write e.g. url = "https://api.openai.com/v1"'
        raise ConfigError(f"url = {shown!r} is not the URL of an API", hint=hint)
    if not model:
        raise ConfigError("model is empty", hint="set model to the model's name on the server")
    if key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key_env):
        facts = f"its {len(key_env)} characters are not a valid name of an environment variable"
        hint = 'export OPENAI_API_KEY=... in the shell, and write key_env = "OPENAI_API_KEY"'
        what = "key_env must be the name of an environment variable that has the API key, not the key itself"
        raise ConfigError(what, facts, hint=hint)
    key = os.environ.get(key_env, "").strip() if key_env else ""
    if key_env and not key:
        facts = "it should have the API key of the judge"
        raise ConfigError(f"the environment variable {key_env} is not set", facts, hint=f"export {key_env}=...")
    if not (key.isascii() and key.isprintable()):
        facts = f"it has {len(key)} characters, and some are not allowed in an HTTP header"
        raise ConfigError(f"the environment variable {key_env} has no API key", facts, hint="set it to the key alone")
    return parts.hostname, key


def _check_questions(
    form: Form, dialect: Dialect, mode: Mode, evidence: tuple[Section, ...], options: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` if settings of the questions are invalid or do not fit together."""
    if not evidence or len(set(evidence)) < len(evidence) or Section.TEXT in evidence:
        known = ", ".join(OF_ROLLOUTS)
        facts = "it is empty, has an entry twice, or has an entry that is not allowed here"
        hint = f"use some of these, each once: {known}"
        raise ConfigError(f"evidence = {list(map(str, evidence))} is invalid", facts, hint=hint)
    if form is Form.TOKEN and (dialect is not Dialect.OPENAI or mode is not Mode.POINTWISE):
        given = f"dialect = '{dialect}', mode = '{mode}'"
        facts = "it reads a score from the probabilities of one token, which only OpenAI's API returns"
        hint = "set dialect = 'openai' and mode = 'pointwise', or use another form"
        raise ConfigError(f"form = 'token' cannot be used with {given}", facts, hint=hint)
    if own := sorted(_OWN_FIELDS & set(options)):
        facts, hint = "etude sets these fields itself", "remove them from options; set the model with model = ..."
        raise ConfigError(f"options must not contain {', '.join(own)}", facts, hint=hint)
