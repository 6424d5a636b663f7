"""Run rollouts. A rollout is one attempt of a policy at a task, in an isolated machine, with an agent program.

The result is a record. Baselines run through the same code, with a script in place of the policy:

>>> from etude.harness import standard_tools
>>> from etude.records import Task
>>> from etude.records.task import Split
>>> from etude.testing import MemoryMachine
>>> task = Task(source="list", split=Split.TRAIN, index=0, family="demo", instruction="make f return 1",
...             files={"a.py": "def f():\\n    return 0\\n"}, exports=("a.py",))
>>> def script():
...     listing = yield "cat", {"path": "a.py"}
...     yield "edit", {"path": "a.py", "line": 2, "text": "return 1"}
...     yield "submit", {}
>>> machine = MemoryMachine({p: t.encode() for p, t in task.files.items()})
>>> messages = demonstrate(task, script(), standard_tools(), machine)
>>> [m["content"] for m in messages if m["role"] == "tool"], machine.files["a.py"]
(['1 def f():\\n2  return 0', 'ok'], b'def f():\\n    return 1\\n')
"""

from etude.rollouts.rollout import not_run, run_rollout, submitted
from etude.rollouts.scripted import Script, ScriptedPolicy, demonstrate, demonstrate_long

__all__ = ["Script", "ScriptedPolicy", "demonstrate", "demonstrate_long", "not_run", "run_rollout", "submitted"]
