"""What placement decides: batches for hosts, and what has to be done after a look at the clock. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from etude.environments.burst.hosts import Need


@dataclass(frozen=True)
class Batch:
    """n machines that a host is to fork: an attempt at a group."""

    id: int
    group: int
    attempt: int  # from 1 on
    snapshot: str
    host: str
    n: int
    need: Need  # of each
    sources: tuple[
        str, ...
    ]  # hosts that the snapshot is copied from, the next where one does not send; (): it is there
    placed_s: float
    there_s: float  # when the host should have the snapshot
    expected_s: float  # when it should have started


@dataclass(frozen=True)
class Review:
    """What has to be done after a look at the clock."""

    batches: tuple[Batch, ...] = ()  # new attempts at groups that have not started
    lost: tuple[Batch, ...] = ()  # started, and gone with their host; n is what had not ended
    hosts: tuple[str, ...] = ()  # that are lost
