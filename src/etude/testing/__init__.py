"""The library's own fakes: one for every seam, small and honest, for tests, demonstrations and your own harness.

A fake keeps the seam's contract, errors included, without processes, files or weights. What one cannot do is said
in its docstring; the most important: **nothing here isolates anything**. `MemoryMachine` and `FakeGrader` run code
in this very process, so hand them only code that we generated ourselves. `contracts` has the suites for plug-ins.
"""

from etude.environments.memory import MemoryMachine, MemoryRuntime, run_python
from etude.testing.learning import (
    EnginePolicy,
    FakeLearner,
    MemoryExperience,
    MemoryTracker,
    ScriptedEngine,
    StreamingPolicy,
    make_version,
)
from etude.testing.machines import FakeGrader, ListSource
from etude.testing.run_processes import FakeRunProcesses

__all__ = [
    "EnginePolicy",
    "FakeGrader",
    "FakeLearner",
    "FakeRunProcesses",
    "ListSource",
    "MemoryExperience",
    "MemoryMachine",
    "MemoryRuntime",
    "MemoryTracker",
    "ScriptedEngine",
    "StreamingPolicy",
    "make_version",
    "run_python",
]
