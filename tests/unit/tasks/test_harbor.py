"""Harbor's tasks: read as its own loader reads them, refused by name where they cannot be had, proven in machines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.here import opened
from tests.tiers import first_few
from tests.unit.environments.images.test_machines import host_root

import etude
from etude.environments import MachineGrader, NamespaceRuntime, simulate_exports
from etude.environments.images import ImageStore, build_from_directory
from etude.errors import TaskError
from etude.loop.task_images import with_built_images, with_images
from etude.records.image import Image
from etude.records.task import Split, Task
from etude.tasks import check, open_source
from etude.tasks.harbor import HarborSource
from etude.tasks.harbor.own_root import OwnRoot

TOML = """schema_version = "1.1"
artifacts = []

[task]
name = "own/hello"
authors = []

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[verifier.env]
WORD = "it's"

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
allow_internet = true
mcp_servers = []

[environment.env]

[solution.env]
NAME = "world"
"""
TEST = """#!/bin/bash
cd /app
if [ "$WORD" = "it's" ] && python3 /tests/check.py; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
TEST_JSON = """python3 /tests/check.py && right=1.0 || right=0.0
printf '{"tests": 3, "reward": %s}' $right > /logs/verifier/reward.json
"""


def hello(folder: Path, *, toml: str = TOML, test: str = TEST) -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nGreet in /app/out/hello.txt, as /app/hint.txt says.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY hint.txt ./\nCOPY data data\n",
        "environment/hint.txt": "Say: Hello, world!\n",
        "environment/data/a.txt": "see /app/hint.txt\n",
        "tests/test.sh": test,
        "tests/check.py": "import sys\nfrom pathlib import Path\npath = Path('/app/out/hello.txt')\n"
        "sys.exit(not path.exists() or path.read_text() != 'Hello, world!\\n')\n",
        "solution/solve.sh": '#!/bin/bash\nmkdir -p /app/out\necho "Hello, $NAME!" > /app/out/hello.txt\n',
    }  # fmt: skip
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def only(source: HarborSource) -> Task:
    [task] = [source.task(split, index) for split in Split for index in range(source.size(split) or 0)]
    return task


def test_a_task_is_read_and_its_places_are_moved_onto_the_runtimes_own_root(tmp_path: Path) -> None:
    hello(tmp_path / "hello")
    source = HarborSource(tmp_path)
    task = only(source)
    assert task.instruction == "Greet in /workspace/out/hello.txt, as /workspace/hint.txt says."
    assert task.files == {"hint.txt": "Say: Hello, world!\n", "data/a.txt": "see /workspace/hint.txt\n"}
    assert task.state
    assert task.exports == ()
    answer = source.answer(task)
    assert answer.verifier is not None
    assert answer.verifier.deadline_s == 60
    assert "/workspace/out/hello.txt" in answer.verifier.files[".harbor/tests/check.py"]
    config = source.config(task)
    assert config.agent_timeout_s == 120
    assert config.requests == {"cpus": 1, "memory_mb": 2048, "allow_internet": True}


@pytest.mark.parametrize("mode", ["state", "separate"])
@pytest.mark.parametrize("test", first_few([TEST, TEST_JSON], 1), ids=["reward.txt", "reward.json"])
def test_it_proves_itself_judged_by_its_state_and_by_its_artifacts(tmp_path: Path, mode: str, test: str) -> None:
    toml = TOML
    if mode == "separate":
        toml = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
        toml = toml.replace("artifacts = []", 'artifacts = ["/app/out/"]')
    hello(tmp_path / "hello", toml=toml, test=test)
    source = HarborSource(tmp_path)
    task = only(source)
    assert task.exports == (("out/",) if mode == "separate" else ())

    async def proven() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))

        async def export(task: Task, files: Mapping[str, bytes], argv: Sequence[str]) -> Mapping[str, bytes]:
            return await simulate_exports(runtime, task, files, argv)

        try:
            (await check(source, MachineGrader(runtime), task.split, deadline_s=600, export=export)).require()
        finally:
            await runtime.close()

    asyncio.run(proven())


def test_with_an_image_nothing_is_moved_and_the_config_is_the_images(tmp_path: Path) -> None:
    toml = TOML.replace("[environment.env]", '[environment.env]\nMODE = "${MODE:-fast}"')
    folder = hello(tmp_path / "hello", toml=toml.replace("[agent]\n", '[agent]\nuser = "root"\n'))
    source = HarborSource(folder, lambda _: Image(digest="ab", workdir="/app", env={"A": "b"}))
    task = only(source)
    assert task.image == Image(digest="ab", workdir="/app", env={"A": "b", "MODE": "fast"}, user="root")
    assert task.files == {}
    assert "/app/out/hello.txt" in task.instruction
    answer = source.answer(task)
    assert answer.verifier is not None
    assert "cp -r" in answer.verifier.argv[-1]
    assert "/app/out/hello.txt" in answer.verifier.files[".harbor/tests/check.py"]


IN_IMAGE = {
    "environment/Dockerfile": "FROM base\nWORKDIR /app\nCOPY hint.txt ./\nRUN mkdir -p /srv/made\n",
    "tests/test.sh": "#!/bin/sh\ncd /app\n"
    'if [ -d /srv/made ] && [ "$(cat out/hello.txt)" = "$(cat /tests/want.txt)" ]\n'
    "then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n",
    "tests/want.txt": "Hello, world!\n",
    "solution/solve.sh": "#!/bin/sh\nmkdir -p /app/out\necho Hello, $NAME! > /app/out/hello.txt\n",
}
PROGRAMS = ("sh", "cat", "cp", "mkdir", "rm", "head", "grep", "tr", "sed", "chmod", "dirname", "find", "ls")


def test_it_proves_itself_on_the_image_that_its_dockerfile_describes(tmp_path: Path) -> None:
    folder = hello(tmp_path / "tasks" / "hello")
    for path, text in IN_IMAGE.items():
        (folder / path).write_text(text)
    store = ImageStore(tmp_path / "images")
    root = host_root(tmp_path / "root", PROGRAMS)
    store.name("base", build_from_directory(store, root, image=Image(digest="", workdir="/")))

    async def proven() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0, images=store))

        async def export(task: Task, files: Mapping[str, bytes], argv: Sequence[str]) -> Mapping[str, bytes]:
            return await simulate_exports(runtime, task, files, argv)

        try:
            source = await with_images(HarborSource(tmp_path / "tasks"), store, runtime)
            task = only(source)
            assert task.image is not None
            assert task.image.workdir == "/app"
            (await check(source, MachineGrader(runtime), task.split, deadline_s=600, export=export)).require()
        finally:
            await runtime.close()

    asyncio.run(proven())


def test_a_pipe_in_a_tasks_environment_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    folder = hello(tmp_path / "tasks" / "hello")
    os.mkfifo(folder / "environment" / "data" / "pipe")
    with pytest.raises(TaskError, match="neither a file nor a folder") as caught:
        with_built_images(HarborSource(tmp_path / "tasks"), ImageStore(tmp_path / "images"))
    assert caught.value.hint


def test_the_scripts_that_are_made_are_shell(tmp_path: Path) -> None:
    hello(tmp_path / "hello")
    for image in (None, Image(digest="ab", workdir="/app")):
        source = HarborSource(tmp_path, lambda _, image=image: image)
        answer = source.answer(only(source))
        assert answer.verifier is not None
        for argv in (answer.reference_argv, answer.verifier.argv):
            subprocess.run(["sh", "-n", "-c", argv[-1]], check=True, timeout=300)


REFUSED = {
    'schema_version = "9.0"': "schema_version = '9.0'",
    "[[steps]]\nname = 'a'": "several steps",
    "[environment]\nos = 'windows'": "run Linux",
    "[environment]\ngpus = 1": "no GPU",
    "[environment]\nmcp_servers = [{name = 'x'}]": "MCP",
    "[environment]\nhealthcheck = {command = 'x'}": "healthcheck",
    "[verifier]\nenvironment = {}": "the task's own image",
    "[verifier]\ncollect = [{command = 'x'}]": "verifier.collect",
    "[environment]\ncpu = 1": "environment.cpus",
    "[environment.env]\nKEY = '${SECRET}'": "variable .* of the host",
    "[verifier]\ntimeout_sec = 0": "timeout_sec = 0",
    "artifacts = ['../x']": "without",
    "[verifier": "cannot be read",
    f"a = {'[' * 5000}": "cannot be read",
    f"a = {'9' * 5000}": "cannot be read",
    "verifier = 3": "not a section",
}


@pytest.mark.parametrize("toml", REFUSED)
def test_harbor_settings_that_would_change_the_task_are_refused_by_name(tmp_path: Path, toml: str) -> None:
    hello(tmp_path / "hello", toml=toml)
    with pytest.raises(TaskError, match=REFUSED[toml]) as caught:
        HarborSource(tmp_path)
    assert "task.toml" in str(caught.value)
    assert caught.value.hint


DOCKERFILES = {
    "FROM a\nWORKDIR /app\nRUN apt-get install x\n": "line 3: RUN needs an image",
    "FROM a\nCOPY hint.txt /etc/\nWORKDIR /app\n": "copies to /etc/hint.txt",
    "FROM a\nWORKDIR /app\nCOPY ../../x .\n": "outside environment",
    "FROM a\nWORKDIR /app\nCOPY none .\n": "none does not exist",
    "FROM a\n": "sets no WORKDIR",
}


@pytest.mark.parametrize("text", DOCKERFILES)
def test_a_dockerfile_that_does_more_than_copy_asks_for_an_image(tmp_path: Path, text: str) -> None:
    folder = hello(tmp_path / "hello")
    (folder / "environment" / "Dockerfile").write_text(text)
    with pytest.raises(TaskError, match=DOCKERFILES[text]):
        only(HarborSource(tmp_path))


def test_only_whole_places_are_moved() -> None:
    root = OwnRoot({}, "/app")
    kept = "/apps /app-x x/app ./app ~/app a.app /testsuite /my/tests"
    assert root.moved(kept) == kept
    assert root.moved("'/app' (/tests/a) /app:/logs") == (
        "'/workspace' (/workspace/.harbor/tests/a) /workspace:/workspace/.harbor/logs"
    )


def test_a_folder_without_tasks_or_parts_of_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no Harbor task"):
        open_source(f"harbor:{tmp_path}", 0)
    folder = hello(tmp_path / "hello")
    (folder / "solution" / "solve.sh").unlink()
    (folder / "solution" / "other.sh").write_text("x")
    source = HarborSource(tmp_path)
    with pytest.raises(TaskError, match=r"no solution/solve\.sh"):
        source.answer(only(source))


@pytest.mark.slow
def test_harbors_own_oracle_and_verifier_agree_in_our_machines(tmp_path: Path) -> None:
    """The real package, in an interpreter of its own: what it says of the solved and of the untouched task."""
    python = os.environ.get("ETUDE_HARBOR_PYTHON")
    if not python:
        pytest.skip("ETUDE_HARBOR_PYTHON names no interpreter (3.12 on) that has harbor 0.25 and what etude needs")
    task = hello(tmp_path / "hello")
    for path, text in IN_IMAGE.items():
        (task / path).write_text(text)
    store = ImageStore(tmp_path / "images")
    root = host_root(tmp_path / "root", (*PROGRAMS, "bash", "tar", "true", "test", "chown"))
    store.name("base", build_from_directory(store, root, image=Image(digest="", workdir="/")))
    script = Path(__file__).parents[2] / "harbor_trial.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(etude.__file__).parents[1])}
    done = subprocess.run(
        [python, str(script), str(task), str(store.path)], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"solved": {"reward": 1.0}, "untouched": {"reward": 0.0}}


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "environment", "tests", "solution"])
def test_a_task_from_elsewhere_reads_no_file_of_the_host(tmp_path: Path, part: str) -> None:
    folder = hello(tmp_path / "tasks" / "hello")
    (folder / part).rename(tmp_path / "elsewhere")
    (folder / part).symlink_to(tmp_path / "elsewhere")

    def use() -> None:
        source = HarborSource(tmp_path / "tasks")
        source.answer(only(source))

    with pytest.raises(TaskError, match=r"is a link|has no "):
        use()
