"""Runtimes by name: the machines of a config are opened with its settings, or refused."""

from __future__ import annotations

import pytest

from etude import config
from etude.environments.backends import open_runtime, runtime_from_config
from etude.environments.config import MachinesConfig
from etude.environments.images.store import ImageStore
from etude.errors import ConfigError, InputError, MachineError


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="no backend 'microvn'") as refused:
        runtime_from_config(MachinesConfig(backend="microvn"))
    assert "'microvm'" in refused.value.hint


def test_limits_that_a_service_would_not_keep_are_refused_and_others_need_its_address(monkeypatch):
    with pytest.raises(InputError, match="remote backend"):
        runtime_from_config(MachinesConfig(backend="remote", cpus=2.0))
    for name in ("E2B_API_URL", "E2B_API_KEY", "E2B_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((InputError, MachineError, ConfigError), match="E2B"):
        runtime_from_config(MachinesConfig(backend="remote"))


def test_images_are_for_backends_that_can_have_them(tmp_path):
    with pytest.raises(InputError, match="images"):
        open_runtime("remote", images=ImageStore(tmp_path))


def test_a_run_says_whose_machines_it_uses(tmp_path):
    (tmp_path / "c.toml").write_text('backend = "microvm"\ncpus = 0.5\n')
    read = config.load(tmp_path / "c.toml", MachinesConfig)
    assert (read.backend, read.cpus, read.memory_bytes) == ("microvm", 0.5, MachinesConfig().memory_bytes)
