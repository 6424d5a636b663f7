"""The data types of etude, as frozen records: tasks, rollouts, samples, completions. Imports no other part of etude.

>>> from etude.records import Version
>>> from etude.records.wire import pack, unpack
>>> unpack(pack(Version(0, "00000000", "0" * 64)), Version).step
0
"""

from etude.records.completion import Completion, CompletionRequest, Sampling, Version, VersionSpan
from etude.records.rollout import Graded, Invalid, Outcome, Rollout, RolloutSpec, Trace
from etude.records.sample import Batch, Sample
from etude.records.task import Answer, Task

__all__ = [
    "Answer", "Batch", "Completion", "CompletionRequest", "Graded", "Invalid", "Outcome", "Rollout", "RolloutSpec",
    "Sample", "Sampling", "Task", "Trace", "Version", "VersionSpan",
]  # fmt: skip
