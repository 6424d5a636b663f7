"""Plug-ins: found by import path, made with their own settings, and named in every error that they cause."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from etude import cli
from etude.config import Plugin, build, load, plugins_in, to_plain, to_toml, with_digests
from etude.corpus import CorpusConfig
from etude.errors import ConfigError, ConfigErrors, Exit, PluginError, PluginRefused, RunRefused, TaskError
from etude.harness import Call, Episode, HarnessConfig, RequestOptions, Workbench, standard_tools
from etude.harness.programs import run_plugin
from etude.harvest import HarvestConfig
from etude.loop.config import RunConfig, check_same_plugins, open_tasks
from etude.loop.corpus import _play
from etude.models.family_lookup import OWN_FAMILIES
from etude.plugins import KINDS, Identity, Kind, bounded, check_all, finite, found, identity, kind_at, make
from etude.records.rollout import Ending
from etude.records.task import Split, Task
from etude.run import RunFolder
from etude.seams import Policy
from etude.tasks import check, open_source
from etude.tasks.corpus import plugin_documents
from etude.tasks.scripts import Demonstrating, WithBaselines
from etude.testing import FakeGrader, MemoryMachine
from etude.testing.contracts import results, sampled_tokens
from etude.training import learner_plugins
from etude.training.config import CorrectionKind, LearnerConfig, PolicyLossKind
from etude.training.learner_plugins import LearnerPlugins

EXAMPLES = {
    "examples.plugins.losses:Gspo": Kind.LOSS,
    "examples.plugins.corrections:Saturating": Kind.CORRECTION,
    "examples.plugins.trackers:Csv": Kind.TRACKER,
    "examples.plugins.sources:Multiply": Kind.SOURCE,
    "examples.plugins.corpora:Folder": Kind.CORPUS,
    "examples.plugins.documents:Tickets": Kind.DOCUMENTS,
    "examples.plugins.tools:Grep": Kind.TOOL,
    "examples.plugins.harnesses:Oriented": Kind.HARNESS,
    "examples.plugins.rewards:FewTurns": Kind.REWARD,
    "examples.plugins.credit:ByRank": Kind.CREDIT,
    "examples.plugins.model_family:AcmeMoe": Kind.MODEL_FAMILY,
    "examples.plugins.drafters:Bigrams": Kind.DRAFTER,
    "examples.plugins.forecasts:LargestOfLate": Kind.FORECAST,
}
LOSS = """
from dataclasses import dataclass
from etude.training.losses import PolicyLoss

@dataclass
class Weighted:
    weight: float = 2.0
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.weight > 100:
            raise ValueError("weight is above 100")

    def __call__(self, tokens):
        return answer(self, tokens)

def answer(self, tokens):
    ratio_R = (tokens.logprobs_R - tokens.sampler_logprobs_R).clamp(max=5).exp()
    loss = -self.weight * (ratio_R * tokens.advantages_R).sum() / tokens.normaliser
    return PolicyLoss(loss, ratio_R.detach(), ratio_R.detach() > 2)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Writes a user's module and returns its name, which no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = []

    def written(source: str = LOSS, more: str = "") -> str:
        names.append(f"users_{abs(hash((request.node.name, len(names))))}")
        (tmp_path / f"{names[-1]}.py").write_text(source + more)
        importlib.invalidate_caches()
        return names[-1]

    yield written
    found.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_family_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_FAMILIES, "")


def refused(kind: Kind, path: str, **settings: object) -> str:
    """The text of the error, whose three parts are there."""
    with pytest.raises((PluginError, ConfigError)) as error:
        make(kind, Plugin(path, settings))
    assert error.value.what
    assert error.value.hint
    assert error.value.exit_code is Exit.BAD_INPUT
    return str(error.value)


def test_a_config_names_a_plugin_by_its_path_or_with_a_table_of_its_settings(tmp_path):
    short = build(LearnerConfig, {"policy_loss": "my_package.losses:Gspo"})
    assert short.policy_loss == Plugin("my_package.losses:Gspo")
    table = {"kind": "my_package.losses:Gspo", "clip_low": 0.1, "names": ["a"], "deep": {"odd key": 1}}
    config = build(RunConfig, {"learner": {"policy_loss": table, "correction": {"kind": "masked"}}})
    assert config.learner.correction is CorrectionKind.MASKED
    assert list(plugins_in(config)) == [("learner.policy_loss", config.learner.policy_loss)]
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml", RunConfig) == config
    assert to_plain(config)["learner"]["policy_loss"] == table


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("pop", "learner.policy_loss = 'pop' is unknown\n  hint: did you mean 'ppo'?"),
        ({"clip": 1}, "learner.policy_loss.kind: expected the name or the import path of a plug-in"),
        ({"kind": "ppo", "clip_low": 0.1}, "unknown key 'learner.policy_loss.clip_low'"),
        ({"kind": "no path"}, "learner.policy_loss = 'no path' is unknown"),
    ],
)
def test_what_is_neither_built_in_nor_an_import_path_is_refused(given, says):
    with pytest.raises(ConfigError) as error:
        build(LearnerConfig, {"policy_loss": given}, "learner")
    assert says in str(error.value)


def test_its_settings_are_converted_to_the_types_of_its_parameters(module):
    path = f"{module()}:Weighted"
    made = make(Kind.LOSS, Plugin(path, {"weight": 3, "names": ["a", "b"]}))
    assert (made.weight, made.names) == (3.0, ("a", "b"))
    assert "did you mean 'learner.policy_loss.weight'?" in refused(Kind.LOSS, path, wieght=1.0)
    assert "learner.policy_loss.weight: expected a number" in refused(Kind.LOSS, path, weight="much")


def test_parameters_of_structs_functions_and_plain_classes_are_settings_too(module):
    name = module(
        more="""
import msgspec
from typing import Annotated

class Struct(msgspec.Struct, frozen=True):
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    __call__ = answer
    weight = 1.0

class Plain:
    def __init__(self, weight: float) -> None:
        self.weight = weight
    __call__ = answer

def function(weight: float = 1.0) -> Weighted:
    return Weighted(weight)

def without_types(weight=1.0):
    return Weighted(weight)
"""
    )
    assert make(Kind.LOSS, Plugin(f"{name}:Struct", {"share": 1})).share == 1.0
    assert "it must be from 0.0 to 1.0" in refused(Kind.LOSS, f"{name}:Struct", share=1.5)
    assert make(Kind.LOSS, Plugin(f"{name}:Plain", {"weight": 2})).weight == 2.0
    assert "'learner.policy_loss.weight' is missing" in refused(Kind.LOSS, f"{name}:Plain")
    assert make(Kind.LOSS, Plugin(f"{name}:function")).weight == 1.0
    assert "parameter 'weight' has no type" in refused(Kind.LOSS, f"{name}:without_types")


def test_a_plugin_that_cannot_be_imported_is_refused_by_name(module):
    import socket

    text = refused(Kind.LOSS, "no_such_package.losses:Gspo")
    assert "plug-in no_such_package.losses:Gspo cannot be imported" in text
    assert f"host {socket.gethostname()} has no module 'no_such_package'" in text
    assert "needs no_such_library" in refused(Kind.LOSS, f"{module('import no_such_library')}:Gspo")
    assert "raised ZeroDivisionError" in refused(Kind.LOSS, f"{module('1 / 0')}:Gspo")
    assert "raised SyntaxError" in refused(Kind.LOSS, f"{module('class')}:Gspo")
    assert "raised SystemExit" in refused(Kind.LOSS, f"{module('raise SystemExit(3)')}:Gspo")
    assert "did you mean 'Weighted'?" in refused(Kind.LOSS, f"{module()}:Wieghted")
    assert "is not an import path" in refused(Kind.LOSS, "losses.Gspo")


def test_what_is_not_of_its_kind_is_refused_with_what_it_lacks(module):
    name = module(
        more="""
class Nothing:
    pass

class Arguments:
    def __call__(self, logprobs, advantages):
        pass

class Waits:
    async def __call__(self, tokens):
        pass

class Raises:
    def __init__(self):
        raise KeyError("no such mode")

number = 3
"""
    )
    assert "it has no method __call__(tokens)" in refused(Kind.LOSS, f"{name}:Nothing")
    assert "cannot be called as method __call__(tokens)" in refused(Kind.LOSS, f"{name}:Arguments")
    assert "must be a plain `def`" in refused(Kind.LOSS, f"{name}:Waits")
    assert "is not a class: it is an int" in refused(Kind.LOSS, f"{name}:number")
    text = refused(Kind.LOSS, f"{name}:Raises")
    assert f"policy loss {name}:Raises cannot be constructed: its constructor raised KeyError: 'no such mode'" in text
    assert f"policy loss {name}:Weighted cannot be constructed" in refused(Kind.LOSS, f"{name}:Weighted", weight=101)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('x')", "computing the loss raised KeyError: 'x'"),
        ("return 3.0", "it is float, and etude.training.losses.PolicyLoss is expected"),
        ("loss = 1.0", "loss is float, and a tensor [] of float on cpu is expected"),
        ("loss = tokens.logprobs_R", "loss is a tensor [11]"),
        ("loss = loss.detach()", "loss has no gradient"),
        ("loss = loss * float('nan')", "loss is NaN"),
        ("loss = loss + float('inf')", "loss is infinite"),
        ("ratio_R = ratio_R[:3]", "ratio_R is a tensor [3]"),
        ("ratio_R = ratio_R * float('nan')", "ratio_R is NaN"),
        ("ratio_R = (ratio_R * tokens.logprobs_R)", "ratio_R has a gradient"),
        ("clipped_R = ratio_R", "clipped_R is a tensor [11] of torch.float32"),
    ],
)
def test_an_error_or_invalid_value_of_a_loss_names_the_loss(module, body, says):
    name = module(
        more=f"""
class Bad(Weighted):
    def __call__(self, tokens):
        done = answer(self, tokens)
        loss, ratio_R, clipped_R = done.loss, done.ratio_R, done.clipped_R
        {body}
        return PolicyLoss(loss, ratio_R, clipped_R)
"""
    )
    with pytest.raises(PluginError) as error:
        LearnerPlugins().loss(Plugin(f"{name}:Bad"), sampled_tokens())
    assert f"policy loss {name}:Bad" in error.value.what
    assert says in error.value.facts
    assert "the run can be resumed" in error.value.hint


def test_a_loss_that_hangs_is_named_at_its_deadline_and_one_that_ends_keeps_its_gradient(module, monkeypatch):
    name = module(
        more="""
import time

class Hangs(Weighted):
    def __call__(self, tokens):
        time.sleep(5)
"""
    )
    monkeypatch.setattr(learner_plugins, "CALL_S", 0.2)
    with pytest.raises(PluginError, match=f"policy loss {name}:Hangs hangs") as error:
        LearnerPlugins().loss(Plugin(f"{name}:Hangs"), sampled_tokens())
    assert "computing the loss has not returned within 0.2 s" in error.value.facts
    monkeypatch.undo()
    tokens = sampled_tokens()
    LearnerPlugins().loss(Plugin(f"{name}:Weighted"), tokens).loss.backward()


def test_a_loss_is_not_called_where_there_is_no_token():
    tokens = sampled_tokens(lengths=())
    done = LearnerPlugins().loss(Plugin("nobody:Home"), tokens)
    done.loss.backward()
    assert float(done.loss.detach()) == 0
    assert not len(LearnerPlugins().corrected(Plugin("nobody:Home"), torch.zeros(0), torch.zeros(0)).weight_R)


def test_a_negative_weight_is_refused(module):
    name = module(
        """
from etude.training.corrections import Corrected

class Negative:
    def __call__(self, log_ratio_R, sequence_R):
        return Corrected(-log_ratio_R.exp(), log_ratio_R.exp())
"""
    )
    with pytest.raises(PluginError, match="returned an invalid result") as error:
        LearnerPlugins().corrected(Plugin(f"{name}:Negative"), torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    assert "the least of weight_R is -1, below 0" in error.value.facts


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
def test_a_number_that_is_none_is_refused_by_name(value):
    assert finite(Kind.LOSS, "a:B", "x", 3) == 3.0
    with pytest.raises(PluginError, match="policy loss a:B"):
        finite(Kind.LOSS, "a:B", "x", value)


def test_plugins_of_a_config_are_checked_in_a_process_of_its_own_before_a_run(module):
    name = module()
    (one,) = check_all([("learner.policy_loss", Plugin(f"{name}:Weighted", {"weight": 3}))])
    assert one == identity(Kind.LOSS, f"{name}:Weighted")
    assert check_all([]) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; os._exit(7)", "ended its process with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import time; time.sleep(1000)", "did not end within 3 s"),
        ("print('chatter'); raise ValueError('no')", "raised ValueError: no"),
    ],
)
def test_a_module_that_hangs_or_kills_its_process_is_named_and_stops_nothing_else(module, source, says):
    name = module(source)
    with pytest.raises(PluginRefused) as error:
        check_all([("learner.policy_loss", Plugin(f"{name}:Gspo"))], deadline_s=3.0 if "sleep" in source else 60.0)
    assert f"{name}:Gspo" in error.value.what
    assert says in error.value.facts


def test_all_plugins_of_a_config_that_cannot_be_used_are_named_at_once(module):
    name, ends = module(), module("import os; os._exit(7)")
    uses = [
        ("learner.policy_loss", Plugin("no_such_package:Loss")),
        ("learner.policy_loss", Plugin(f"{name}:Weighted", {"wieght": 1.0, "weight": "much"})),
        ("learner.policy_loss", Plugin(f"{name}:Weighted")),
        ("learner.policy_loss", Plugin(f"{ends}:Loss")),
    ]
    with pytest.raises(ConfigErrors, match="the config has 4 errors") as error:
        check_all(uses)
    assert error.value.exit_code is Exit.BAD_INPUT
    whats = [one.what for one in error.value.errors]
    assert whats[0] == "plug-in no_such_package:Loss cannot be imported"
    assert whats[1:3] == ["unknown key 'learner.policy_loss.wieght'", "learner.policy_loss.weight"]
    assert whats[3] == f"policy loss {ends}:Loss cannot be constructed"


def test_its_code_is_known_by_distribution_version_and_source(module):
    name = module()
    mine, theirs = identity(Kind.LOSS, f"{name}:Weighted"), identity(Kind.LOSS, "msgspec:Struct")
    assert (mine.distribution, mine.version, len(mine.digest)) == ("", "", 64)
    assert theirs.distribution == "msgspec"
    assert theirs.version


def test_a_process_with_another_source_than_the_runs_record_refuses_it(module):
    config = build(LearnerConfig, {"policy_loss": f"{module()}:Weighted"})
    path = config.policy_loss.path
    same = with_digests(config, {path: identity(Kind.LOSS, path).digest})
    make(Kind.LOSS, same.policy_loss)
    other = with_digests(config, {path: "0" * 64})
    with pytest.raises(PluginError, match="has other code than the run recorded") as error:
        make(Kind.LOSS, other.policy_loss)
    assert "the run recorded 000000000000" in error.value.facts


def test_a_run_is_not_resumed_with_another_version_of_a_plugin_unless_the_user_accepts_it(tmp_path):
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=0)
    assert run.plugins() == []
    then = Identity("loss", "my:Gspo", "mine", "1.0", "a" * 64)
    now = msgspec.structs.replace(then, version="1.1", digest="b" * 64)
    run.record_plugins(msgspec.to_builtins([then]))
    check_same_plugins(run, [then], accept=False)
    with pytest.raises(RunRefused) as error:
        check_same_plugins(run, [now], accept=False)
    assert "now my:Gspo (mine 1.1, source bbbbbbbbbbbb), the run has my:Gspo (mine 1.0" in error.value.facts
    assert "--changed-plugins" in error.value.hint
    check_same_plugins(run, [now], accept=True)
    run.record_plugins(msgspec.to_builtins([now]))
    assert RunFolder.open(run.path).plugins() == msgspec.to_builtins([now])


def test_the_config_of_a_run_has_the_recorded_source_of_its_plugins(tmp_path):
    from etude.loop.config import read_config

    config = build(RunConfig, {"learner": {"policy_loss": "my:Gspo"}})
    run = RunFolder.create(tmp_path / "a", config_toml=to_toml(config), seed=0)
    run.record_plugins(msgspec.to_builtins([Identity("loss", "my:Gspo", "", "", "a" * 64)]))
    assert read_config(run).learner.policy_loss.digest == "a" * 64
    assert read_config(run) == config


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_example_keeps_its_contract(path, capsys):
    assert cli.main(["plugins", "check", path]) == Exit.DONE
    printed = capsys.readouterr().out
    assert printed.startswith(f"{EXAMPLES[path].noun} {path} (no installed package, source ")
    assert "FAILED" not in printed


def test_every_kind_is_listed_with_its_setting_and_has_an_example(capsys):
    assert cli.main(["plugins", "list"]) == Exit.DONE
    printed = capsys.readouterr().out
    for kind, facts in KINDS.items():
        assert f"{kind}: {facts.noun}" in printed
        assert facts.setting in printed
        assert found(facts.protocol)
        assert found(facts.contract)
    assert "ppo, cispo" in printed
    assert {*EXAMPLES.values()} == {*KINDS}


def test_a_broken_promise_is_printed_and_fails_the_check(module, capsys):
    name = module(
        more="""
class Wrong(Weighted):
    def __call__(self, tokens):
        done = answer(self, tokens)
        return PolicyLoss(-done.loss, done.ratio_R, done.clipped_R)
"""
    )
    assert cli.main(["plugins", "check", f"{name}:Wrong", "--kind", "loss", "--set", "weight=1.5"]) == Exit.FAILED
    printed = capsys.readouterr().out
    assert "FAILED  on policy the gradient raises tokens of positive advantage: the sum of gradient" in printed
    assert "7 of 8 passed" in printed
    assert cli.main(["plugins", "check", f"{name}:Wrong", "--set", "wieght=1.5"]) == Exit.BAD_INPUT
    assert cli.main(["plugins", "check", f"{name}:Wrong", "--kind", "lost"]) == Exit.BAD_INPUT
    assert "did you mean 'loss'?" in capsys.readouterr().err


def test_a_promise_that_hangs_is_ended_at_its_deadline(module):
    name = module(
        more="""
import time
class Slow(Weighted):
    def __call__(self, tokens):
        while True:
            time.sleep(0.01)
"""
    )
    suite = found(KINDS[Kind.LOSS].contract)
    (first, broken), *_ = results(suite, lambda: make(Kind.LOSS, Plugin(f"{name}:Slow")), deadline_s=0.2)
    assert first
    assert "the test did not end: it took more than 0.2 s" in broken


def test_built_in_kinds_are_still_named_as_before():
    config = build(LearnerConfig, {"policy_loss": "cispo", "correction": "masked"})
    assert (config.policy_loss, config.correction) == (PolicyLossKind.CISPO, CorrectionKind.MASKED)
    assert to_plain(config)["policy_loss"] == "cispo"


def test_a_call_that_raises_hangs_or_returns_is_told_apart():
    assert bounded(Kind.SOURCE, "a:B", "size", lambda: 3, deadline_s=10) == 3
    with pytest.raises(PluginError, match="task source a:B failed") as error:
        bounded(Kind.SOURCE, "a:B", "size", lambda: 1 // 0, deadline_s=10)
    assert "size raised ZeroDivisionError" in error.value.facts
    with pytest.raises(TaskError, match="no task"):
        bounded(Kind.SOURCE, "a:B", "task", lambda: open_source("repair", 0).task(Split.TRAIN, -1), deadline_s=10)
    never = threading.Event()
    with pytest.raises(PluginError, match="task source a:B hangs") as error:
        bounded(Kind.SOURCE, "a:B", "size", never.wait, deadline_s=0.2)
    assert "size has not returned within 0.2 s" in error.value.facts
    never.set()


SOURCE = """
from examples.plugins.sources import Multiply

class Own(Multiply):
    name = "own"
"""


def test_a_task_source_is_opened_by_path_and_in_the_config(module):
    path = "examples.plugins.sources:Multiply"
    assert open_source(path, 0).task(Split.TRAIN, 3).instruction == "write times(n) in calc.py: n times 11"
    config = build(RunConfig, {"tasks": {"source": {"kind": path, "count": 7}}})
    assert open_tasks(config).size(Split.HELDOUT) == 7
    assert build(RunConfig, {"tasks": {"source": path}}).tasks.source == Plugin(path)
    assert build(RunConfig, {"tasks": {"source": "harbor:Tasks"}}).tasks.source == "harbor:Tasks"
    with pytest.raises(ConfigError, match="cuont"):
        open_tasks(build(RunConfig, {"tasks": {"source": {"kind": path, "cuont": 7}}}))
    proof = asyncio.run(check(open_source(path, 0), FakeGrader(), Split.TRAIN, 8))
    proof.require()
    assert proof.num_proven == 8


@pytest.mark.parametrize(
    ("body", "call", "says"),
    [
        ("def size(self, split): return -1", lambda s: s.size(Split.TRAIN), "returned -1"),
        (
            "def task(self, split, index): return 3",
            lambda s: s.task(Split.TRAIN, 0),
            "task(train, 0) returned int, expected Task",
        ),
        (
            "def task(self, split, index): return super().task(split, 5)",
            lambda s: s.task(Split.TRAIN, 0),
            "returned train task 5 of 'own'",
        ),
        (
            "def answer(self, task): return None",
            lambda s: s.answer(s.task(Split.TRAIN, 0)),
            "is NoneType, expected Answer",
        ),
        ("def answer(self, task): return {}['x']", lambda s: s.answer(s.task(Split.TRAIN, 0)), "raised KeyError: 'x'"),
    ],
)
def test_nonsense_of_a_task_source_is_named_with_whose_it_is(module, body, call, says):
    name = module(f"{SOURCE}\nclass Bad(Own):\n    {body}\n")
    with pytest.raises(PluginError) as error:
        call(open_source(f"{name}:Bad", 0))
    assert f"task source {name}:Bad" in error.value.what
    assert says in error.value.facts


def test_a_source_that_claims_the_name_of_a_built_in_one_is_refused(module):
    name = module(SOURCE.replace('"own"', '"repair"'))
    with pytest.raises(PluginRefused, match="has a reserved name"):
        open_source(f"{name}:Own", 0)


def test_what_a_source_offers_beside_tasks_is_found_by_what_it_has(module):
    name = module(
        SOURCE
        + """
    def baseline(self, task, kind, *, seed):
        yield "submit", {}
"""
    )
    mine, plain, repair = (open_source(s, 0) for s in (f"{name}:Own", "examples.plugins.sources:Multiply", "repair"))
    assert isinstance(mine, WithBaselines)
    assert list(mine.baseline(mine.task(Split.TRAIN, 0), "random", seed=1)) == [("submit", {})]
    assert not isinstance(mine, Demonstrating)
    assert not isinstance(plain, WithBaselines)
    assert isinstance(repair, WithBaselines)
    assert isinstance(repair, Demonstrating)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return []", "it has no document"),
        ("yield 'a'; yield 3", "document 1 is int"),
        ("from etude.records.exchange import Exchange; yield Exchange('a', 3)", "document 0 is Exchange"),
        ("yield ' '", "document 0 has 1 characters"),
        ("yield 'a'; 1 / 0", "document 1 raised ZeroDivisionError"),
        ("return 3", "documents raised TypeError"),
    ],
)
def test_nonsense_of_a_corpus_source_is_named_with_whose_it_is(module, body, says):
    name = module(f"class Texts:\n    def documents(self, seed):\n        {body}\n")
    with pytest.raises(PluginError) as error:
        list(plugin_documents(Plugin(f"{name}:Texts"), seed=0))
    assert f"corpus source {name}:Texts" in error.value.what
    assert says in error.value.facts


def test_the_texts_of_a_corpus_source_come_in_its_order(tmp_path):
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "b.md").write_text("second")
    plugin = Plugin("examples.plugins.corpora:Folder", {"path": str(tmp_path)})
    assert sorted(plugin_documents(plugin, seed=0)) == ["first", "second"]


TOOL = """
import asyncio
from etude.harness.commands import Parameter, Signature

class Own:
    signature = Signature("own", "Does something.", (Parameter("text"),))

    async def run(self, bench, text):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "run returned int, not str"),
        ("return {}['x']", "run raised KeyError: 'x'"),
        ("await asyncio.sleep(1000)", "run has not returned within"),
    ],
)
def test_what_a_tool_raises_or_returns_is_named_with_whose_it_is(module, monkeypatch, body, says):
    monkeypatch.setattr("etude.harness.tools.PLUGIN_GRACE_S", 0.1)
    name = module(TOOL.replace("{body}", body))
    tools = standard_tools((Plugin(f"{name}:Own"), "ls"))
    assert list(tools.signatures) == ["own", "ls"]
    bench = Workbench(MemoryMachine({}), (), set(), "key", 0.1, 400)
    with pytest.raises(PluginError) as error:
        asyncio.run(tools.run(Call("own", {"text": "a"}), bench))
    assert f"tool {name}:Own" in error.value.what
    assert says in error.value.facts


def test_what_the_agent_caused_is_answered_by_a_tool_of_a_plugin_too(module):
    name = module(TOOL.replace("{body}", 'raise ValueError(f"no such mode: {text}")'))
    bench = Workbench(MemoryMachine({}), (), set(), "key", 1.0, 400)
    tools = standard_tools((Plugin(f"{name}:Own"),))
    assert asyncio.run(tools.run(Call("own", {"text": "a"}), bench)) == "refused: no such mode: a"


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ('"own", "Does', '"my own", "Does', "its name is 'my own'"),
        ('Parameter("text")', 'Parameter("word")', "run(bench, text) cannot be called with them"),
        ('Parameter("text")', 'Parameter("text", required=False)', "missing a required argument: 'text'"),
    ],
)
def test_a_tool_that_could_never_be_called_is_refused_before_a_run(module, was, now, says):
    name = module(TOOL.replace(was, now).replace("{body}", "return text"))
    with pytest.raises(PluginRefused, match=f"the signature of tool {name}:Own") as error:
        standard_tools((Plugin(f"{name}:Own"),))
    assert says in error.value.facts


SHOWS = """
    def demonstration(self, split, index, *, seed, right):
        from etude.tasks.scripts import Demonstration
        return Demonstration(self.task(split, index), self.script(seed))

    def script(self, seed):
        {body}
"""
EDIT = 'yield "edit", {"path": "calc.py", "line": shown.split()[1], "text": "x"}'
CALLS_OWN = f'shown = yield "own", {{"text": str(seed)}}; {EDIT}'


def test_demonstrations_call_the_tools_of_the_run(module):
    tool = module(TOOL.replace("{body}", 'await asyncio.sleep(0); return f"line {int(text) + 2}"'))
    source = open_source(f"{module(SOURCE + SHOWS.replace('{body}', CALLS_OWN))}:Own", 0)
    size = source.size(Split.TRAIN)
    limits = HarnessConfig(tools=(Plugin(f"{tool}:Own"), "submit"))
    talks = _play(source, 2, limits, seed=5, first=size - 1, right_body=1)
    tasks = [source.task(Split.TRAIN, index) for index in (size - 1, 0)]  # the first one comes again with another seed
    assert [talk[0]["content"] for talk in talks] == [task.instruction for task in tasks]
    assert [talk[2]["content"] for talk in talks] == ["line 7", "line 8"]
    assert talks[0][4]["content"] == "no such line"
    with pytest.raises(TaskError, match="a demonstration of own cannot be played") as error:
        _play(source, 1, HarnessConfig(), seed=5, first=0, right_body=1)
    assert "it calls 'own', and the tools are ls, cat, test, edit, submit, write, run" in error.value.facts


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "the script of its demonstration is int, expected a generator"),
        ("yield 'ls'", "yields 'ls', expected (tool name, arguments)"),
        ("yield 'ls', {}; 1 / 0", "the script of its demonstration raised ZeroDivisionError"),
    ],
)
def test_nonsense_of_a_demonstration_is_named_with_whose_it_is(module, body, says):
    name = module(SOURCE + SHOWS.replace("{body}", body))
    with pytest.raises(PluginError) as error:
        _play(open_source(f"{name}:Own", 0), 1, HarnessConfig(), seed=0, first=0, right_body=1)
    assert f"task source {name}:Own" in error.value.what
    assert says in error.value.facts


def test_the_contract_of_a_source_plays_its_demonstrations(module, capsys):
    uses_output = f'shown = yield "cat", {{"path": "calc.py"}}; {EDIT}'
    own_tool = f'shown = yield "own", {{"text": "a"}}; {EDIT}'
    for body in (uses_output, own_tool):
        assert cli.main(["plugins", "check", f"{module(SOURCE + SHOWS.replace('{body}', body))}:Own"]) == Exit.DONE
    wrong = module(SOURCE + SHOWS.replace("{body}", 'yield "cat", {"file": "calc.py"}'))
    assert cli.main(["plugins", "check", f"{wrong}:Own"]) == Exit.FAILED
    assert "a demonstration does not fit the tools: it calls cat(file), expected (path)" in capsys.readouterr().out


def test_a_loss_without_a_number_is_told_for_that_and_not_for_other_bits(module, capsys):
    name = module(
        more="""
class Empty(Weighted):
    def __call__(self, tokens):
        done = answer(self, tokens)
        return PolicyLoss(done.loss * float("nan"), done.ratio_R, done.clipped_R)
"""
    )
    assert cli.main(["plugins", "check", f"{name}:Empty"]) == Exit.FAILED
    assert "ok      the same tokens give the same bits" in capsys.readouterr().out


def test_two_tools_of_one_name_are_refused(module):
    name = module(TOOL.replace('"own", "Does', '"ls", "Does').replace("{body}", "return text"))
    with pytest.raises(ConfigError, match="two tools are named 'ls'"):
        standard_tools(("ls", Plugin(f"{name}:Own")))


def test_the_tools_of_a_config_are_names_and_plugins(tmp_path):
    config = build(RunConfig, {"harness": {"tools": ["ls", {"kind": "examples.plugins.tools:Grep", "most": 3}]}})
    assert config.harness.tools == ("ls", Plugin("examples.plugins.tools:Grep", {"most": 3}))
    assert [place for place, _ in plugins_in(config)] == ["harness.tools[1]"]
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml", RunConfig) == config
    assert check_all(list(plugins_in(config)))[0].kind == "tool"


def test_nothing_in_production_imports_the_fakes_or_asks_for_the_generated_source():
    root = Path(cli.__file__).parents[1]
    for path in root.rglob("*.py"):
        text = "\n".join(line for line in path.read_text().splitlines() if ">>>" not in line)
        assert not re.search(r"isinstance\([^)]*RepairSource", text), path
        if path.relative_to(root).parts[0] != "testing" and path.name != "plugins.py":
            assert not re.search(r"^\s*(from|import) etude\.testing", text, re.MULTILINE), path


GUIDE = Path(cli.__file__).parents[3] / "docs" / "guides" / "plugins.md"


def test_the_guides_class_and_its_settings_are_so(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```(\w*)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "losses.py").write_text(next(text for kind, text in blocks if kind == "python"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert cli.main(["plugins", "check", "my_package.losses:Reinforce", "--set", "cap=1.5"]) == Exit.DONE
    assert "8 of 8 passed" in capsys.readouterr().out
    used = set()
    for config in (tomllib.loads(text) for kind, text in blocks if kind == "toml"):
        kind = CorpusConfig if "sources" in config else HarvestConfig if "forecast" in config else RunConfig
        for place, plugin in plugins_in(build(kind, config)):
            make(kind_at(place), plugin, where=place)
            used.add(kind_at(place))
    assert used == {*KINDS}
    for kind in KINDS:
        assert f"| `{kind}` | `{KINDS[kind].setting}` |" in GUIDE.read_text()


HARNESS = """
import asyncio

class Own:
    async def run(self, episode):
        {body}
"""


def episode_of(policy: Policy, limits: HarnessConfig, chat: object = None) -> Episode:
    files = {"calc.py": "x = 1\n"}
    task = Task(source="s", split=Split.TRAIN, index=0, family="f", instruction="i", files=files, exports=("calc.py",))
    machine, options = MemoryMachine({}), RequestOptions(session_id="s", seed=0)
    return Episode(task, machine, policy=policy, chat=chat, tools=standard_tools(), limits=limits, options=options)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "run returned int, not None"),
        ("return {}['x']", "run raised KeyError: 'x'"),
        ("raise TimeoutError('mine')", "run raised TimeoutError: mine"),
        ("await asyncio.sleep(1000)", "run has not returned within"),
    ],
)
def test_what_a_harness_raises_or_returns_is_named_with_whose_it_is(module, monkeypatch, body, says):
    monkeypatch.setattr("etude.harness.programs.PLUGIN_GRACE_S", -0.1)
    plugin = Plugin(f"{module(HARNESS.replace('{body}', body))}:Own")
    limits = HarnessConfig(max_turns=1, turn_deadline_s=0.2, tool_deadline_s=0.1)
    with pytest.raises(PluginError) as error:
        asyncio.run(run_plugin(plugin, make(Kind.HARNESS, plugin), episode_of(SlowPolicy(), limits)))
    assert f"harness {plugin}" in error.value.what
    assert says in error.value.facts


SLOW = """
import asyncio

class Own:
    async def run(self, episode):
        await asyncio.gather(episode.policy.complete(1), episode.policy.complete(2))
        await asyncio.sleep({after})
        episode.submit()
"""


class SlowPolicy:
    async def complete(self, request):
        await asyncio.sleep(0.4 * request)


@pytest.mark.parametrize(("after", "hangs"), [(0.0, False), (1000.0, True)])
def test_the_deadline_of_a_harness_stands_still_while_it_waits_for_the_policy(module, monkeypatch, after, hangs):
    monkeypatch.setattr("etude.harness.programs.PLUGIN_GRACE_S", 0.1)
    plugin = Plugin(f"{module(SLOW.replace('{after}', str(after)))}:Own")
    limits, harness = HarnessConfig(max_turns=1, tool_deadline_s=0.1), make(Kind.HARNESS, plugin)
    running = run_plugin(plugin, harness, episode_of(SlowPolicy(), limits))
    if hangs:
        with pytest.raises(PluginError, match="hangs"):
            asyncio.run(running)
    else:
        assert asyncio.run(running).ending is Ending.SUBMITTED


FAMILY = """
from etude.models.families.qwen3_moe import Qwen3Moe

class Forgets(Qwen3Moe):
    model_type = "forgets_moe"
    hf_class = "ForgetsForCausalLM"

    def write(self, c):
        return {**super().write(c), "norm_topk_prob": not c.routing.normalise}

class NotDerived:
    model_type = "other_moe"
"""


def test_a_model_family_that_breaks_a_promise_fails_the_check(module, capsys):
    name = module(FAMILY)
    assert cli.main(["plugins", "check", f"{name}:Forgets"]) == Exit.FAILED
    printed = capsys.readouterr().out
    assert printed.startswith(f"model family {name}:Forgets (no installed package, source ")
    assert "FAILED  sizes are read as they were written: config.json was read as another model" in printed
    assert cli.main(["plugins", "check", f"{name}:NotDerived", "--kind", "model_family"]) == Exit.BAD_INPUT
    assert "is not derived from etude.models.config.ModelFamily" in capsys.readouterr().err


def test_a_model_family_of_the_config_is_a_plugin_whose_code_is_recorded(module, tmp_path):
    path = f"{module(FAMILY)}:Forgets"
    config = build(RunConfig, {"model": {"family": path}})
    assert list(plugins_in(config)) == [("model.family", Plugin(path))]
    assert check_all(list(plugins_in(config))) == [identity(Kind.MODEL_FAMILY, path)]
    assert not list(plugins_in(build(RunConfig, {"model": {"family": "olmoe", "num_kv_heads": 4}})))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml", RunConfig) == config


def test_a_harness_is_named_in_the_config(tmp_path):
    config = build(RunConfig, {"harness": {"program": {"kind": "examples.plugins.harnesses:Oriented", "lines": 1}}})
    assert list(plugins_in(config)) == [("harness.program", config.harness.program)]
    with pytest.raises(ConfigError, match="did you mean 'loop'; or give an import path"):
        build(RunConfig, {"harness": {"program": "lop"}})
