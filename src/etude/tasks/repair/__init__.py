"""Generated small repositories with one bug each: tasks that a model with a million parameters can learn to repair.

>>> from etude.records.task import Split
>>> source = RepairSource(seed=0)
>>> [name for name, arguments in oracle(source.problem(Split.TRAIN, 0))]
['test', 'cat', 'edit', 'test', 'submit']
"""

from etude.tasks.repair.demonstrations import imperfect, oracle, random_agent
from etude.tasks.repair.problem import Problem
from etude.tasks.repair.source import RepairSource

__all__ = ["Problem", "RepairSource", "imperfect", "oracle", "random_agent"]
