"""What is asked of a simulated fleet, what fails in it, and what came of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.config import ranged


@dataclass(frozen=True)
class Scenario:
    """Who asks for what, of which hosts. A machine uses a tenth of a core on average."""

    machines: int = ranged(100_000, low=1)
    group: int = ranged(16, low=1, high=64)  # machines of one request
    snapshots: int = ranged(1_000, low=1)
    snapshot_bytes: int = ranged(16 << 20, low=0)
    hosts: int = ranged(105, low=1)
    cores: int = ranged(96, low=1)
    overcommit: float = ranged(1.15, low=1.0)  # cores given away over cores there are
    mean_life_s: float = ranged(60.0, low=0.1)
    horizon_s: float = ranged(60.0, low=1.0)
    seed: int = 0


@dataclass(frozen=True)
class Faults:
    """What fails: hosts by number. Partitions longer than the lease cost the machines behind them."""

    crashes: tuple[tuple[int, float], ...] = ()  # (host, when)
    slow: tuple[tuple[int, float], ...] = ()  # (host, times slower)
    partitions: tuple[tuple[int, float, float], ...] = ()  # (host, from, to)
    loss: float = 0.0  # share of messages


EVERY_KIND = Faults(
    crashes=((3, 0.5), (40, 15.0)),
    slow=((7, 8.0), (8, 30.0)),
    partitions=((11, 0.3, 2.3), (12, 10.0, 30.0)),
    loss=0.01,
)
"""Within one minute what a fleet of this size sees in weeks."""


@dataclass
class Simulated:
    """What came of it. Times in seconds."""

    all_ready_s: float = float("inf")  # when the last of the first machines was ready
    ready_s: list[float] = field(default_factory=list)  # of each batch of the first machines, from its request on
    later_s: list[float] = field(default_factory=list)  # of those asked for later
    num_asked: int = 0  # machines
    num_lost: int = 0  # never ready, or gone and not replaced at the end
    num_restarted: int = 0  # lost with their host and started again
    num_twice: int = 0
    num_leaked: int = 0
    num_batches: int = 0
    control_cpu_s: float = 0.0  # that the control plane took, in simulated time: what each message was measured to cost
    placement_cpu_s: float = 0.0  # CPU time of this process in the placement code
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)  # of it: (number, seconds) of each kind
    curve: list[tuple[float, int, float, float]] = field(default_factory=list)  # (t, ready, mean, max share of cores)
