"""A ledger's queries read as many rows after a million rollouts as at the start: counted, not timed."""

from __future__ import annotations

from collections import Counter
from functools import partial

from benchmarks.run.ledger import LIVE, past, play

from etude.experience import Ledger, audit

PAST = 20_480
EVERY = 50  # instructions of SQLite's machine between two counts


class Counting:
    """Instructions of SQLite's machine by question."""

    def __init__(self, ledger: Ledger) -> None:
        self.spent, self._now = Counter[str](), 0
        ledger._db._connection.set_progress_handler(self._tick, EVERY)

    def _tick(self) -> None:
        self._now += 1

    def __call__(self, name, work):
        before = self._now
        result = work()
        self.spent[name] += self._now - before
        return result


def test_no_query_of_a_run_reads_rows_that_have_ended(tmp_path):
    found = []
    for length in (0, PAST):
        ledger = Ledger(tmp_path / f"{length}.sqlite", capacity=LIVE)
        past(ledger, 0, length)
        costs = Counting(ledger)
        traces = tmp_path / f"traces-{length}"
        ids = play(ledger, traces, 1_000_000, costs)
        costs("waiting", ledger.waiting)
        costs("audit --new", partial(audit, ledger, traces, [(1_000_000, ids)], after=999_999)).require_sound()
        found.append(costs.spent)
        assert ledger.states()["no-signal"] == length + LIVE
        ledger.close()
    short, long = found
    assert set(short) >= {
        "start",
        "start 16",
        "finish",
        "finish 16",
        "ready_groups",
        "open_groups",
        "batch of a step",
        "commit of a step",
        "prune",
    }
    for name, spent in long.items():
        assert spent <= 1.25 * short[name] + 20, (name, spent, short[name])
