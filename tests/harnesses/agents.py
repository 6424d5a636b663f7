"""The real agents that tests play, each in a folder of its own: ``python -m tests.harnesses.agents`` installs them.

`ETUDE_AGENTS` is the folder, by default ``~/.cache/etude/agents``. About 2.5 gigabytes in all, and nothing of it is in
etude's own environment. The layout is that of docs/guides/harnesses.md, where `{cwd}` is this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("ETUDE_AGENTS", "~/.cache/etude/agents")).expanduser()
INSTALL = "python -m tests.harnesses.agents"
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Agent:
    """A section of the guide: the program that must be there for it, and what installs it."""

    section: str
    program: str
    install: Callable[[Path], None]

    def why_not(self) -> str:
        """Why it cannot be played here; "" if it can."""
        return "" if (FOLDER / self.program).exists() else f"{self.section} is not installed: {INSTALL}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_S)


def _python(folder: str, requirements: str) -> Callable[[Path], None]:
    def install(root: Path) -> None:
        _run(sys.executable, "-m", "venv", str(root / folder))
        _run(str(root / folder / "bin" / "pip"), "install", "--quiet", "-r", str(HERE / requirements))

    return install


def _node(root: Path) -> None:
    (root / "agents").mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "package.json", root / "agents")
    _run("npm", "install", "--prefix", str(root / "agents"), "--no-audit", "--no-fund", "--loglevel=error")


_MAIN = _python("agents", "requirements.txt")
AGENTS = {
    agent.section: agent
    for agent in (
        Agent("mini-swe-agent", "agents/bin/mini", _MAIN),
        Agent("OpenAI Agents SDK", "agents/bin/mini", _MAIN),
        Agent("Claude Code", "agents/node_modules/.bin/claude", _node),
        Agent("Codex", "agents/node_modules/.bin/codex", _node),
        Agent("Aider", "agents-aider/bin/aider", _python("agents-aider", "requirements-aider.txt")),
        Agent("Inspect", "agents-inspect/bin/inspect", _python("agents-inspect", "requirements-inspect.txt")),
    )
}
"""All agents by their section in the guide."""


def install(names: Sequence[str] = ()) -> dict[str, str]:
    """Install the agents that are not there yet, all or those named. Returns why some could not be had, by name."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    examples = FOLDER / "examples"
    examples.unlink(missing_ok=True)  # it may be that of another checkout
    examples.symlink_to(HERE.parents[1] / "examples")
    failed = {}
    for agent in AGENTS.values():
        if (names and agent.section not in names) or not agent.why_not():
            continue
        print(f"installing {agent.section} into {FOLDER}", flush=True)
        try:
            agent.install(FOLDER)
        except (OSError, subprocess.SubprocessError) as error:
            failed[agent.section] = str(error)
    return failed


if __name__ == "__main__":
    failures = install(sys.argv[1:])
    for name, why in failures.items():
        print(f"not to be had: {name}: {why}")
    raise SystemExit(bool(failures))
