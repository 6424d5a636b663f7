"""Read the ``task.toml`` of a Harbor task.

Follows the schema of harbor 0.25 (versions 1.0 to 1.4). An unsupported setting that changes the meaning of a task is an
error with a hint. Requests for resources and network are stored but not enforced. Descriptive fields are ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import TaskError, nearest
from etude.tasks.text_files import read_text

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_TOP = {
    "schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution", "source",
    "multi_step_reward_strategy", "steps", "artifacts",
}  # fmt: skip
_VERIFIER = {
    "timeout_sec", "env", "user", "environment_mode", "environment", "collect", "network_mode", "allowed_hosts",
}  # fmt: skip
_AGENT = {"timeout_sec", "user", "network_mode", "allowed_hosts"}
_ENVIRONMENT = {
    "build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu",
    "mcp_servers", "env", "skills_dir", "healthcheck", "workdir", "allow_internet", "network_mode", "allowed_hosts",
    "memory", "storage",
}  # fmt: skip
_REQUESTS = ("cpus", "memory_mb", "storage_mb", "memory", "storage", "network_mode", "allow_internet", "allowed_hosts")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class HarborConfig:
    """The fields of a Harbor ``task.toml`` that etude uses.

    `separate` means that the verifier runs in a new machine, with only the `artifacts` of the agent's machine: paths
    that are absolute or relative to the working directory. `environment`, `verifier_env` and `solution_env` are
    variables for all commands, for the verifier, and for the reference solution. `agent_user` and `verifier_user` are
    the users they run as. `agent_timeout_s` None: no limit. `requests` are the file's settings for resources and
    network."""

    name: str
    docker_image: str
    workdir: str
    separate: bool  # the verifier runs on declared artifacts in a new machine
    artifacts: tuple[str, ...]  # absolute paths, or relative to the working directory
    environment: dict[str, str]
    verifier_env: dict[str, str]
    solution_env: dict[str, str]
    verifier_timeout_s: float
    agent_timeout_s: float | None
    agent_user: str
    verifier_user: str
    requests: dict[str, Any]  # for resources and network, as written in the file


def read_config(folder: Path) -> HarborConfig:
    """Read the ``task.toml`` in a task's folder. Raises `TaskError` that names the file."""
    path = folder / "task.toml"
    try:
        plain = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # a number with too many digits is a plain ValueError
        raise TaskError(f"{path} cannot be read", str(error), hint="write TOML in the format of harbor") from None
    return _Reader(path).config(plain, folder.name)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def config(self, plain: Mapping[str, Any], name: str) -> HarborConfig:
        self._known(plain, _TOP, "")
        version = str(plain.get("schema_version", plain.get("version", VERSIONS[-1])))
        if version not in VERSIONS:
            raise self._error(f"schema_version = {version!r}", f"supported: {', '.join(VERSIONS)}")
        if plain.get("steps"):
            raise self._error("[[steps]]", "tasks with several steps are not supported: write one task per step")
        verifier = self._section(plain, "verifier", _VERIFIER)
        agent = self._section(plain, "agent", _AGENT)
        environment = self._section(plain, "environment", _ENVIRONMENT)
        solution = self._section(plain, "solution", {"env"})
        self._refuse(environment, verifier)
        task = plain.get("task")
        return HarborConfig(
            name=str(task.get("name", name)) if isinstance(task, dict) else name,
            docker_image=str(environment.get("docker_image") or ""),
            workdir=str(environment.get("workdir") or ""),
            separate=verifier.get("environment_mode") == "separate",
            artifacts=self._artifacts(plain.get("artifacts", [])),
            environment=self._env(environment.get("env", {}), "environment"),
            verifier_env=self._env(verifier.get("env", {}), "verifier"),
            solution_env=self._env(solution.get("env", {}), "solution"),
            verifier_timeout_s=self._seconds(verifier.get("timeout_sec", 600.0), "verifier"),
            agent_timeout_s=None if "timeout_sec" not in agent else self._seconds(agent["timeout_sec"], "agent"),
            agent_user=str(agent.get("user") or ""),
            verifier_user=str(verifier.get("user") or ""),
            requests={key: environment[key] for key in _REQUESTS if environment.get(key) is not None},
        )

    def _refuse(self, environment: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
        """Raise `TaskError` for unsupported settings that cannot be ignored without changing the task."""
        refused = (
            (str(environment.get("os", "linux")).lower() != "linux", "environment.os", "machines run Linux"),
            (bool(environment.get("gpus")), "environment.gpus", "machines have no GPU"),
            (environment.get("tpu") is not None, "environment.tpu", "machines have no TPU"),
            (bool(environment.get("mcp_servers")), "environment.mcp_servers", "MCP tools are not supported"),
            (environment.get("healthcheck") is not None, "environment.healthcheck",
             "services in a machine are not supported"),
            (verifier.get("environment") is not None, "verifier.environment",
             "the verifier runs in the task's own image"),
            (bool(verifier.get("collect")), "verifier.collect", "let the verifier read the state of the machine"),
        )  # fmt: skip
        for is_set, key, hint in refused:
            if is_set:
                raise self._error(f"{key} is set", hint)

    def _known(self, plain: Mapping[str, Any], known: Iterable[str], section: str) -> None:
        for key in plain:
            if key not in known:
                raise self._error(
                    f"unknown key {f'{section}.{key}' if section else key!r}", nearest(key, known, section)
                )

    def _section(self, plain: Mapping[str, Any], name: str, known: Iterable[str]) -> dict[str, Any]:
        section = plain.get(name, {})
        if not isinstance(section, dict):
            raise self._error(f"{name} is not a section", f"write [{name}]")
        self._known(section, known, name)
        return section

    def _artifacts(self, entries: Any) -> tuple[str, ...]:
        if not isinstance(entries, list):
            raise self._error("artifacts is not a list", 'write artifacts = ["out/report.json"]')
        paths = []
        for entry in entries:
            source = entry.get("source") if isinstance(entry, dict) else entry
            if not isinstance(source, str) or ".." in source.split("/") or not source.strip("/"):
                raise self._error(f"artifact {entry!r:.80}", "give a path without '..'")
            if isinstance(entry, dict) and (entry.get("service") not in (None, "main") or entry.get("exclude")):
                raise self._error(f"artifact {source!r} of a service, or with exclude", "only one service is supported")
            paths.append(source)
        return tuple(paths)

    def _env(self, env: Any, section: str) -> dict[str, str]:
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise self._error(f"[{section}.env] is not a table of strings", 'write NAME = "value"')

        def value(match: re.Match[str]) -> str:
            if match[2] is None:
                what = f"[{section}.env] uses the variable ${{{match[1]}}} of the host"
                raise self._error(what, f"machines get no variables of the host: give a default, ${{{match[1]}:-...}}")
            return match[2]

        return {key: _VARIABLE.sub(value, text) for key, text in env.items()}

    def _seconds(self, value: Any, section: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 86_400:
            raise self._error(f"{section}.timeout_sec = {value!r}", "give more than 0 and at most 86400 seconds")
        return float(value)

    def _error(self, facts: str, hint: str) -> TaskError:
        return TaskError(str(self._path), facts, hint=hint)
