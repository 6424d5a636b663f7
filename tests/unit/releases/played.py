"""A channel with versions, settings and outcomes of users, for the tests of releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from etude.records.completion import Version
from etude.releases import Arm, GateResult, Outcome, Release, Releases, ReleaseSettings, arm_of
from etude.releases.pointers import branch_version
from etude.releases.settings import Metric, SuiteGate
from etude.seams import BlobStore
from etude.weights import Channel, Tensor
from etude.weights.chain.branches import point
from etude.weights.chain.history import chain

GATE = (SuiteGate("repair"),)
KEPT = Metric("kept")


def settings(**changed: Any) -> ReleaseSettings:
    """Settings under which a subject counts at once."""
    usual: dict[str, Any] = {
        "gate": GATE,
        "metrics": (KEPT,),
        "shares": (10, 50, 100),
        "subjects": 5,
        "share_s": 10.0,
        "window_s": 0.0,
        "silent_s": 1000.0,
        "max_s": 5000.0,
    }
    return ReleaseSettings(**(usual | changed))


def published(store: BlobStore, *, versions: int = 2) -> list[Version]:
    """Publish versions of the channel `policy` until it has so many. The branch `stable` is at the first of them."""
    found = [manifest.version for manifest in chain(store, "policy")]
    channel = Channel(store)
    for step in range(len(found), versions):
        tensors = {"w": Tensor("bf16", (64,), np.full(64, 0x3F80 + step, np.uint16))}
        found.append(channel.publish(tensors, step=step, parent=found[-1] if found else None, rollout_ids=[]).version)
    if branch_version(store, "policy", "stable") is None:
        point(store, "policy", found[0], branch="stable")
    return found


def passed(release: Release, *failures: str) -> GateResult:
    return GateResult(candidate=str(release.candidate), stable=str(release.stable), suites=(), failures=failures)


def begun(path: Path, store: BlobStore, **changed: Any) -> Releases:
    """A release of version 1 that is a canary at its first share, at time 0."""
    releases = Releases(path)
    release = releases.begin(
        store, published(store)[1], settings(**changed), channel="policy", location="memory", now=0.0
    )
    releases.gate(passed(release), now=0.0)
    releases.advance(store, now=0.0)
    return releases


def outcomes(
    release: Release, users: Iterable[int], value: Callable[[int, Arm], float], *, metric: str = "kept", tag: str = ""
) -> list[Outcome]:
    """One outcome of each user at the release's share."""
    found = []
    for i in users:
        arm = arm_of(release.salt, f"user-{i}", release.share)
        name = f"{tag}{metric}-{release.share}-{i}"
        found.append(Outcome(id=name, subject=f"user-{i}", metric=metric, value=value(i, arm)))
    return found


def branches(store: BlobStore) -> tuple[Version | None, Version | None]:
    """The versions of the branches stable and canary."""
    return branch_version(store, "policy", "stable"), branch_version(store, "policy", "canary")
