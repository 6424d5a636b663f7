"""A run whose tasks are Harbor's, on images of their Dockerfiles: prepared, played and graded by its own processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.here import needs
from tests.unit.environments.images.test_machines import host_root
from tests.unit.tasks.test_harbor import IN_IMAGE, PROGRAMS, hello

from etude.config import build, to_toml
from etude.environments.images import ImageStore, build_from_directory
from etude.errors import TaskError
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.loop.config import RunConfig, open_tasks
from etude.loop.evaluation import Baseline, baseline
from etude.loop.preflight import preflight
from etude.loop.processes import Supervisor
from etude.loop.run_processes import open_processes
from etude.records.image import Image
from etude.records.task import Split
from etude.run import RunFolder
from etude.tasks.splits import split_of
from etude.telemetry import Telemetry
from etude.training.tokenizer import train_tokenizer

pytestmark = pytest.mark.timeout(1800)


def heldout(folder: Path) -> None:
    """Ask for the same in words that fall into the held-out split."""
    text = "Greet in /app/out/hello.txt, as /app/hint.txt says"
    number = next(n for n in range(1000) if split_of(f"{text} ({n}).") is Split.HELDOUT)
    (folder / "instruction.md").write_text(f"{text} ({number}).\n")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folder = hello(tmp_path / "tasks" / "hello")
    for path, text in IN_IMAGE.items():
        (folder / path).write_text(text)
    heldout(folder)
    store = ImageStore(tmp_path / "images")
    root = host_root(tmp_path / "root", PROGRAMS)
    store.name("base", build_from_directory(store, root, image=Image(digest="", workdir="/")))
    return build(
        RunConfig,
        {
            "tasks": {"source": f"harbor:{tmp_path / 'tasks'}"},
            "machines": {"images": str(store.path)},
            "harness": {"tools": ["write", "run", "submit"], "context_tokens": 4096},
            "engine": {"context_tokens": 4096},
            "model": {"context_tokens": 4096},
            "rl": {"steps": 0},
            "fleet": {"num_workers": 1, "num_graders": 1},
        },
    )


def test_a_run_builds_the_images_of_its_tasks_and_its_processes_work_on_them(tmp_path: Path, config: RunConfig) -> None:
    needs("namespace")
    with pytest.raises(TaskError, match=r"the image of .*hello is not built"):
        open_tasks(config)
    said: list[str] = []
    preflight(config, log=said.append)
    assert said == ["the image of hello is ready"]
    task = open_tasks(config).task(Split.HELDOUT, 0)
    assert task.image is not None
    assert ImageStore(Path(config.machines.images)).collect()[0] >= 0
    assert open_tasks(config).task(Split.HELDOUT, 0) == task, "collected while it is in use"
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    words = ["run sh -c a b c d e f g h i j k l m n o p q r s t u v w x y z write submit"] * 20
    train_tokenizer(
        words, run / "tokenizer", vocab_size=320, special_tokens=SPECIAL_TOKENS, chat_template=chat_template()
    )

    async def rates() -> list[float]:
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        async with open_processes(run, config, telemetry, Supervisor(telemetry)) as members:
            await members.start_workers_and_graders()
            source = open_tasks(config)
            settings = {"num_tasks": 1, "seed": 0}
            return [await baseline(members, source, kind, telemetry=telemetry, **settings) for kind in Baseline]

    assert asyncio.run(rates()) == [1.0, 0.0]
