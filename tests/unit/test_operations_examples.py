"""The systemd units, the alert rules and the runbook: what they name is what this version has."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from etude.cli.commands import build_parser
from etude.errors import Exit
from etude.gateway.access_log import Metrics, Record
from etude.inference.metrics import Counters, exposition
from etude.seams import EngineInfo

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "operations"
UNITS = sorted((FOLDER / "systemd").iterdir())
RULES = FOLDER / "prometheus" / "alerts.yml"
RUNBOOK = ROOT / "docs" / "guides" / "operations.md"
OF_OTHERS = {  # exported by Prometheus itself, and by node_exporter
    "up",
    "node_filesystem_avail_bytes",
    "node_filesystem_size_bytes",
    "node_systemd_unit_state",
}
WORDS = {  # of PromQL
    "and", "or", "unless", "by", "without", "on", "ignoring", "sum", "max", "min", "avg", "rate", "delta", "changes",
    "histogram_quantile", "max_over_time", "avg_over_time", "le", "model",
}  # fmt: skip


def section(unit: Path, name: str) -> dict[str, list[str]]:
    """The settings of a section; one may be given several times."""
    found: dict[str, list[str]] = {}
    inside = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            inside = line.strip("[]")
        elif inside == name and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_every_command_of_a_unit_is_one_that_etude_takes(unit: Path) -> None:
    service = section(unit, "Service")
    for line in [*service["ExecStart"], *service.get("ExecStartPost", [])]:
        program, *words = shlex.split(line.replace("%i", "product"))
        assert program == "/opt/etude/bin/etude"
        build_parser().parse_args(words)


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_unit_is_restarted_after_errors_that_may_pass_and_after_no_others(unit: Path) -> None:
    service = section(unit, "Service")
    if service.get("Type") == ["oneshot"]:
        assert "Restart" not in service
        assert unit.with_suffix(".timer") in UNITS
        return
    assert service["Restart"] == ["on-failure"]
    [never] = service["RestartPreventExitStatus"]
    trains = "run@" in unit.name or "learn" in unit.name
    codes = {Exit.BAD_INPUT, Exit.OTHER_RUN} | ({Exit.HELD} if trains else set())
    assert set(map(int, never.split())) == codes
    assert Exit.FAILED not in codes
    if trains:
        assert service["SuccessExitStatus"] == [str(Exit.INTERRUPTED.value)]
    assert int(section(unit, "Unit")["StartLimitBurst"][0]) <= 5


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault_in_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: Debian's package systemd")
    for one in UNITS:
        (tmp_path / one.name).write_text(one.read_text().replace("/opt/etude/bin/etude", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    )
    told = [line for line in done.stderr.splitlines() if unit.name.partition(".")[0].rstrip("@") in line]
    assert (done.returncode, told) == (0, []), done.stderr


def names_in(rule: str) -> set[str]:
    """The names of metrics in an expression: what is no word of PromQL, no label and no text."""
    plain = re.sub(r'"[^"]*"', "", rule)
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", plain)
    plain = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", plain)
    return {word for word in re.findall(r"[a-zA-Z_]\w*", plain) if word not in WORDS}


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported_by_serving() -> set[str]:
    """The names on the pages of a gateway and of an engine."""
    metrics = Metrics()
    metrics.count(Record(method="POST", dialect="chat", first_s=0.1), 200, 1.0)
    page, _ = metrics.page({"m": (1, 2, 3)}, captured={"failed": 0}, signals={})
    info = EngineInfo(
        name="e", version=None, paused=False, context_tokens=8, max_sequences=1, num_running=0, num_waiting=0,
        kv_tokens_free=8, capabilities=(),
    )  # fmt: skip
    lines = [*page.decode().splitlines(), *exposition(Counters(), info).splitlines()]
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


def test_every_metric_of_the_alerts_for_serving_is_exported_by_the_gateway_or_an_engine() -> None:
    named = {name for rule in alerts() for name in names_in(str(rule["expr"]))}
    serving = {name for name in named if re.match("etude_(gateway|engine)_", name)}
    assert len(serving) >= 8
    assert serving - exported_by_serving() == set()
    of_runs = {
        name for name in named if re.match("etude_(rl|eval|mid_training)_", name)
    }  # see tests/loop/test_alerts.py
    assert named - serving - of_runs == OF_OTHERS


def test_every_alert_leads_to_a_part_of_the_runbook() -> None:
    heads = re.findall(r"^## (.*)$", RUNBOOK.read_text(), re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    for rule in alerts():
        annotations = rule["annotations"]
        assert isinstance(annotations, dict)
        page, _, anchor = annotations["runbook"].partition("#")
        assert (ROOT / page) == RUNBOOK
        assert anchor in anchors, rule["alert"]


def test_promtool_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: Prometheus' own tool")
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, timeout=300)


def commands(text: str) -> list[str]:
    """The commands in the blocks of shell of a guide, each in one line, without comments."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.M | re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [part.strip() for line in lines if line and not line.startswith("#") for part in line.split(" && ")]


def test_every_etude_command_of_the_runbook_parses() -> None:
    found = [shlex.split(line) for line in commands(RUNBOOK.read_text())]
    own = [words[1:] for words in found if words[0] == "etude"]
    assert len(own) > 30
    for words in own:
        build_parser().parse_args(words)


def test_every_other_program_of_the_runbook_is_a_known_one() -> None:
    known = {"etude", "sudo", "systemctl", "journalctl", "df", "du", "mv", "cp", "install", "pg_restore", "psql", "ls",
             "kubectl", "promtool", "python", "printf", "aws", "cat", "shred", "pip"}  # fmt: skip
    found = {shlex.split(line)[0] for line in commands(RUNBOOK.read_text())}
    assert found - known == set()
