"""Built-in trackers in a config, and what is checked of them before a run starts."""

from __future__ import annotations

import socket
import sys

import pytest

from etude import cli
from etude.config import Plugin, build, load, plugins_in, to_plain, to_toml
from etude.errors import ConfigError, Exit, PluginRefused
from etude.loop.config import RunConfig
from etude.plugins import Kind, check_all, make
from etude.trackers import BUILT_IN
from etude.trackers.support import final_results, without_secrets

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "prometheus": "prometheus_client"}


def test_built_in_trackers_are_named_alone_or_with_settings_and_several_at_once(tmp_path):
    given = ["tensorboard", {"kind": "wandb", "mode": "offline", "tags": ["a"]}, "my_package.trackers:Own"]
    config = build(RunConfig, {"trackers": given})
    assert config.trackers == (
        Plugin("tensorboard"),
        Plugin("wandb", {"mode": "offline", "tags": ["a"]}),
        Plugin("my_package.trackers:Own"),
    )
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml", RunConfig) == config
    assert [place for place, _ in plugins_in(config)] == ["trackers[0]", "trackers[1]", "trackers[2]"]


@pytest.mark.parametrize("given", ["tensorbord", {"kind": "tensorbord"}, {"kind": "tensorbord", "folder": "x"}])
def test_an_unknown_tracker_is_refused_with_the_nearest_name(given):
    with pytest.raises(ConfigError) as error:
        build(RunConfig, {"trackers": [given]})
    assert str(error.value).startswith("trackers[0] = 'tensorbord' is unknown\n  hint: did you mean 'tensorboard'")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_missing_library_is_refused_with_the_command_that_installs_it(monkeypatch, name):
    for module in [module for module in sys.modules if module.partition(".")[0] == LIBRARIES[name]]:
        monkeypatch.delitem(sys.modules, module)

    class Missing:
        def find_spec(self, module, path=None, target=None):
            if module == LIBRARIES[name]:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(PluginRefused) as error:
        make(Kind.TRACKER, Plugin(name))
    assert error.value.exit_code is Exit.BAD_INPUT
    assert error.value.what == f"tracker {name} cannot be used"
    assert error.value.facts == f"{LIBRARIES[name]} is not installed on host {socket.gethostname()}"
    assert error.value.hint == f"pip install 'etude[{name}]'"


def test_a_port_that_is_in_use_is_refused_before_a_run_starts():
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        uses = [("trackers[0]", Plugin("prometheus", {"listen": f"127.0.0.1:{port}"}))]
        with pytest.raises(ConfigError) as error:
            check_all(uses)
    assert error.value.what == f"tracker prometheus: cannot listen on 127.0.0.1:{port}"
    assert error.value.facts == "Address already in use"
    assert "choose a free port" in error.value.hint
    assert check_all(uses) == []  # free again; the code of a built-in tracker is etude's, and not recorded


@pytest.mark.slow
def test_a_built_in_tracker_is_checked_by_its_name(capsys):
    pytest.importorskip("prometheus_client")
    assert cli.main(["plugins", "check", "prometheus", "--set", "listen=127.0.0.1:0"]) == Exit.DONE
    assert "tracker prometheus (" in (printed := capsys.readouterr().out)
    assert "6 of 6 passed" in printed


@pytest.mark.parametrize("listen", ["8791", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(listen):
    pytest.importorskip("prometheus_client")
    with pytest.raises(ConfigError, match="it is not HOST:PORT"):
        make(Kind.TRACKER, Plugin("prometheus", {"listen": listen}))


def test_secrets_of_a_config_are_hidden_and_nothing_else():
    config = {
        "experience": {"ledger": "postgresql://me:pw@host/db", "dsn": "host=x password=pw user=me"},
        "program": {"kind": "a.b:C", "env": {"OPENAI_API_KEY": "sk-1", "HF_TOKEN": "hf_1", "PATH": "/bin"}},
        "arguments": ["--api-key", "sk-2", "--hf-token=hf_2", "--port", "80"],
        "stores": {"weights": "s3://bucket/prefix", "traces": "az://a/b?sig=1&token=abc", "signing_key": "keys/a"},
        "repositories": ["https://ghp_1@github.com/a/b", "https://github.com/a/b", "ssh://git@github.com/a"],
        "passwords": ["a"],
        "access_key": "AKIA",
        "turn_tokens": 24,
        "token": 3,
    }
    assert without_secrets(config) == {
        "experience": {"ledger": "postgresql://me:***@host/db", "dsn": "host=x password=*** user=me"},
        "program": {"kind": "a.b:C", "env": {"OPENAI_API_KEY": "***", "HF_TOKEN": "***", "PATH": "/bin"}},
        "arguments": ["--api-key", "***", "--hf-token=***", "--port", "80"],
        "stores": {"weights": "s3://bucket/prefix", "traces": "az://a/b?sig=1&token=***", "signing_key": "keys/a"},
        "repositories": ["https://***@github.com/a/b", "https://github.com/a/b", "ssh://git@github.com/a"],
        "passwords": ["***"],
        "access_key": "***",
        "turn_tokens": 24,
        "token": 3,
    }
    plain = to_plain(RunConfig())
    assert without_secrets(plain) == plain


def test_final_results_are_those_of_a_finished_run(tmp_path):
    assert final_results(tmp_path) == {}
    text = '{"finished": %s, "heldout": {"after": {"rate": 0.5}, "during": [{"rate": 0.1}]}, "transfer": null}'
    (tmp_path / "summary.json").write_text(text % "false")
    assert final_results(tmp_path) == {}
    (tmp_path / "summary.json").write_text(text % "true")
    assert final_results(tmp_path) == {"result/heldout/after/rate": 0.5}
