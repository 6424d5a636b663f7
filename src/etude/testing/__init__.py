"""Fakes for every protocol in `etude.seams`, and contract suites: the tests for a plug-in of your own.

A fake implements the full contract of its protocol, including errors, without processes, files or weights. Its
docstring lists its limitations. **There is no isolation**: `MemoryMachine` and `FakeGrader` run code in the current
process, so use them only with trusted code. `contracts`, `rewards` and `model_family` have the contract suites."""

from etude.environments.memory import MemoryMachine, MemoryRuntime, run_python
from etude.testing.learning import (
    EnginePolicy,
    FakeLearner,
    MemoryTracker,
    ScriptedEngine,
    StreamingPolicy,
    make_version,
)
from etude.testing.machines import FakeGrader, FakeRunProcesses, ListSource

__all__ = [
    "EnginePolicy",
    "FakeGrader",
    "FakeLearner",
    "FakeRunProcesses",
    "ListSource",
    "MemoryMachine",
    "MemoryRuntime",
    "MemoryTracker",
    "ScriptedEngine",
    "StreamingPolicy",
    "make_version",
    "run_python",
]
