"""Simulated canaries: how often the rules promote or roll back a version that is no better or worse, and one that is.

    python -m benchmarks.production.canary [--canaries 200]

Each canary has users with an own probability of a kept edit (beta distributed, mean .6) and of a dissatisfied reply
(mean .1, a guard). Users come at their own rates over days; some are silent, and some send hundreds of outcomes. The
rules (`etude.releases.decide`) look every hour, at shares of 1, 5 and 25 %, for up to 14 days at each, with their
defaults. In "A/A by hours" the quality of both versions also changes with the hour and from day to day.

As a control, the same values at 25 % are tested by a test of two means of fixed size, at each of the same looks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report import report
from etude.evals.intervals import wilson
from etude.releases import Action, Arm, ReleaseSettings, decide
from etude.releases.assignment import SALT_BYTES, place_of
from etude.releases.decision import Traffic
from etude.releases.settings import Metric, SuiteGate

Rng = np.random.Generator
HOUR, DAY = 3600.0, 86_400.0
SETTINGS = ReleaseSettings(
    gate=(SuiteGate("own"),), metrics=(Metric("kept"), Metric("dissatisfied", higher_is_better=False))
)


@dataclass(frozen=True)
class Kind:
    """A kind of canaries: number of users, the canary's effect on kept edits, and whether quality changes by hours.

    `rates`: of known users, the probabilities of a kept edit with each version; each simulated user is one of them."""

    name: str
    users: int
    effect: float = 0.0
    by_hours: bool = False
    share: float = 1.0  # of `--canaries` that are simulated
    rates: Mapping[Arm, Sequence[float]] | None = None


KINDS = (
    Kind("A/A", 20_000),
    Kind("A/A by hours", 20_000, by_hours=True),
    Kind("+3 points, 20,000 users", 20_000, 0.03, share=0.5),
    Kind("+3 points, 60,000 users", 60_000, 0.03, share=0.5),
    Kind("+3 points, 150,000 users", 150_000, 0.03, share=0.5),
    Kind("+10 points, 20,000 users", 20_000, 0.10, share=0.5),
    Kind("-3 points, 60,000 users", 60_000, -0.03, share=0.5),
    Kind("-20 points, 20,000 users", 20_000, -0.20, share=0.5),
)


class Users:
    """Users of one canary; draws the values with which they count at a share."""

    def __init__(self, rng: Rng, kind: Kind) -> None:
        self.rng, self.kind, n = rng, kind, kind.users
        if kind.rates is None:
            kept = rng.beta(2.4, 1.6, n)
            self.kept = {Arm.STABLE: kept, Arm.CANARY: kept + kind.effect}
        else:
            who = rng.integers(len(kind.rates[Arm.STABLE]), size=n)
            self.kept = {arm: np.array(rates)[who] for arm, rates in kind.rates.items()}
        self.angry = rng.beta(0.5, 4.5, n)
        self.wait_s = DAY / rng.gamma(0.7, 1.5, n).clip(0.02)  # mean seconds between visits
        self.num = np.minimum(rng.zipf(1.6, n), 500).clip(max=SETTINGS.cap)  # outcomes in a window, of which cap count
        salt = rng.bytes(SALT_BYTES)
        places = np.array([place_of(salt, f"user-{i}") for i in range(n)], np.uint64)
        self.place = places / 2.0**64

    def values(self, share: int, since: float) -> tuple[dict[Arm, np.ndarray], dict[str, dict[Arm, np.ndarray]]]:
        """The times at which users first come at a share, ascending, and their values by metric and version."""
        first = since + self.rng.exponential(self.wait_s)
        order = np.argsort(first)
        canary = self.place[order] * 100 < share
        kept = np.where(canary, self.kept[Arm.CANARY][order], self.kept[Arm.STABLE][order])
        if self.kind.by_hours:
            at = first[order]
            kept = kept + 0.1 * np.sin(2 * np.pi * at / DAY) + 0.05 * np.sin(at / DAY)
        num = self.num[order]
        good = self.rng.binomial(num, kept.clip(0, 1)) / num
        angry = self.rng.binomial(num, self.angry[order]) / num
        arms = {Arm.CANARY: canary, Arm.STABLE: ~canary}
        times = {arm: first[order][mask] for arm, mask in arms.items()}
        return times, {
            "kept": {arm: good[mask] for arm, mask in arms.items()},
            "dissatisfied": {arm: angry[mask] for arm, mask in arms.items()},
        }


def peeked(values: dict[Arm, np.ndarray], counts: list[dict[Arm, int]]) -> bool:
    """Whether a test of two means at 5 % sees a difference at any of the looks."""
    for count in counts:
        a, b = (values[arm][: count[arm]] for arm in (Arm.CANARY, Arm.STABLE))
        if min(a.size, b.size) >= 30:
            error = np.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
            if abs(a.mean() - b.mean()) > 1.96 * error:
                return True
    return False


def simulate(rng: Rng, kind: Kind) -> dict[str, Any]:
    """One canary: its end, the days until then, the canary's subjects at the last share, and the control."""
    users, now = Users(rng, kind), 0.0
    for share in SETTINGS.compared_shares:
        since, looks = now, list[dict[Arm, int]]()
        times, values = users.values(share, since)
        while True:
            now += HOUR
            count = {arm: int(np.searchsorted(times[arm], now - SETTINGS.window_s)) for arm in Arm}
            looks.append(count)
            seen = {name: {arm: by[arm][: count[arm]] for arm in Arm} for name, by in values.items()}
            last = {arm: now for arm in Arm}
            found = decide(SETTINGS, share, Traffic(since, now, last), seen)  # type: ignore[arg-type]
            if found.action is not Action.WAIT:
                break
        if found.action is not Action.GROW or share == SETTINGS.compared_shares[-1]:
            break
    ends = {Action.GROW: "promoted", Action.ROLL_BACK: "rolled back", Action.HOLD: "held"}
    at_25 = share == SETTINGS.compared_shares[-1]
    return {
        "end": ends[found.action],
        "days": now / DAY,
        "subjects": found.evidence[0].canary,
        "peeked": at_25 and peeked(values["kept"], looks),
    }


def row(rng: Rng, kind: Kind, num: int) -> dict[str, Any]:
    """What became of many canaries of a kind."""
    found = [simulate(rng, kind) for _ in range(num)]
    ends = Counter(one["end"] for one in found)
    decided = wilson(num - ends["held"], num)
    result = {
        "users": kind.users,
        "canaries": num,
        **{end.replace(" ", "_"): ends[end] for end in ("promoted", "held", "rolled back")},
        "decided_share": [round(x, 4) for x in (decided.value, decided.low, decided.high)],
        "days_p50": round(float(np.median([one["days"] for one in found])), 2),
        "canary_subjects_p50": float(np.median([one["subjects"] for one in found])),
        "peeked_test_decided": sum(one["peeked"] for one in found),
    }
    print(kind.name, result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    rows = {kind.name: row(rng, kind, max(1, round(args.canaries * kind.share))) for kind in KINDS}
    settings = {"alpha": SETTINGS.alpha, "shares": SETTINGS.shares, "metrics": len(SETTINGS.metrics)}
    report("canary", {"settings": settings | {"look_every_s": HOUR}, "kinds": rows})


if __name__ == "__main__":
    main()
