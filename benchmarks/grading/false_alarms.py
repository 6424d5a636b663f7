"""How often the detector of cheats takes the reward of honest work: in runs of the example, and in demonstrations.

In the example a grade is of results compared outside the machine, on inputs that the agent never saw: whoever is
graded above 0 has solved the task, whatever its files look like. So a flagged rollout that was graded above 0 is an
honest one that loses its reward, a false alarm; one graded 0 loses nothing. Demonstrations are honest by making, right
and wrong bodies mixed. Shares have 95 % intervals (Wilson).

`python -m benchmarks.grading.false_alarms RUN [RUN ...] [--demonstrations 2000]`
Run folders of examples/laptop, of this version or an earlier one; half a minute for the demonstrations.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import report
from etude.environments.grading.cheat_detector import find_cheating
from etude.evals.intervals import wilson
from etude.harness import standard_tools
from etude.records import Graded
from etude.records.rollout import ToolCall
from etude.records.task import Trust
from etude.rollouts.scripted import demonstrate
from etude.tasks import RepairSource
from etude.tasks.scripts import demonstrations
from etude.telemetry import read_events
from etude.testing import MemoryMachine


def share(number: int, of: int) -> dict[str, Any]:
    """A share with its interval."""
    found = wilson(number, of)
    return {"number": number, "of": of, "share": found.value, "low": found.low, "high": found.high}


def in_runs(runs: Iterable[Path]) -> dict[str, Any]:
    """Flagged rollouts of training, and those among them whose results were right."""
    graded, solved, flagged, false, rules = 0, 0, 0, 0, Counter[str]()
    for run in runs:
        events = [event for event in read_events(run / "events") if event["kind"] in ("rollout", "rollout.signs")]
        signs = {e["rollout_id"]: e for e in events if e["kind"] == "rollout.signs" and e["state"] == "quarantined"}
        ended = {e["rollout_id"]: e for e in events if e["kind"] == "rollout" and e["outcome"] == "graded"}
        for rollout_id, event in ended.items():
            sign = signs.get(rollout_id)
            right = float(event["reward"] if sign is None else sign.get("graded", event["reward"])) > 0
            graded, solved = graded + 1, solved + right
            flagged, false = flagged + (sign is not None), false + (right and sign is not None)
            rules.update([] if sign is None else {one.partition(":")[0] for one in sign["signs"]})
    return {
        "flagged": share(flagged, graded),
        "solved_and_flagged": share(false, solved),
        "rules": dict(sorted(rules.items())),
    }


def in_demonstrations(count: int, seed: int) -> dict[str, Any]:
    """Flagged demonstrations of the example's corpus."""
    alarmed, rules = 0, Counter[str]()
    for each in demonstrations(RepairSource(seed=seed), count=count, seed=seed, right_body=0.6):
        machine = MemoryMachine({path: text.encode() for path, text in each.task.files.items()})
        talk = demonstrate(each.task, each.script, standard_tools(), machine)
        functions = [made["function"] for message in talk for made in message.get("tool_calls", ())]
        calls = [[ToolCall(name=f["name"], arguments=f["arguments"], output="")] for f in functions]
        exports = {path: machine.files[path] for path in each.task.exports}
        changed = any(each.task.files[path].encode() != data for path, data in exports.items())
        outcome = Graded.of(float(changed), trust=Trust.DATA, reason="it was changed")
        found = find_cheating(each.task, calls=calls, exports=exports, outcome=outcome)
        alarmed += bool(found)
        rules.update({one.rule for one in found})
    return {"flagged": share(alarmed, count), "rules": dict(sorted(rules.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of examples/laptop")
    parser.add_argument("--demonstrations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = {"runs": in_runs(args.runs), "demonstrations": in_demonstrations(args.demonstrations, args.seed)}
    report("false_alarms", {"num_runs": len(args.runs), **found})


if __name__ == "__main__":
    main()
