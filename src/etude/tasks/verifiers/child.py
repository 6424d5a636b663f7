"""The child process: serve the rows and the scoring of one `verifiers` environment as JSON lines.

Runs in the interpreter that has the `verifiers` package, and imports nothing of etude. Each line of stdin is {"id",
"do", ...}; each response is {"id", "ok": ...} or {"id", "error": text}. Stdout is for responses; output of the
environment goes to stderr. For verifiers 0.4 (v1).

- open {"environment", "settings"}: {"version", "size" (null: infinite), "hashes"}
- row {"index"}: {"instruction", "answer" (null: unknown), "needs" (why it cannot be scored from text, or "")}
- score {"index", "completion"}: {"reward", "metrics"}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any

MAX_ROWS = 200_000


class Environment:
    """The rows of one `verifiers` environment, loaded in order when they are needed."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import verifiers
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        config = taskset_config_type(name).model_validate({**settings, "id": name})
        taskset = load_taskset(config)
        self.version = verifiers.__version__
        self.endless = not taskset.bounded
        self._iterator, self._rows = iter(taskset), list[Any]()

    def description(self) -> dict[str, Any]:
        """Return the version of `verifiers`, the number of rows and their hashes; for an endless environment the number
        is None and the hashes are [].

        Raises `ValueError` for one with more than `MAX_ROWS` rows."""
        hashes = []
        if not self.endless:
            while len(self._rows) <= MAX_ROWS and self._more():
                pass
            if len(self._rows) > MAX_ROWS:
                raise ValueError(f"it has more than {MAX_ROWS} rows")
            hashes = [row.hash for row in self._rows]
        return {"version": self.version, "size": None if self.endless else len(hashes), "hashes": hashes}

    def row(self, index: int) -> dict[str, Any]:
        """Return the instruction of a row, its answer if that is a text, and the result of `needs` for its task."""
        task = self._task(index)
        data = task.data
        parts = [data.system_prompt, data.prompt_text]
        answer = getattr(data, "answer", None)
        return {
            "instruction": "\n\n".join(part for part in parts if part),
            "answer": answer if isinstance(answer, str) else None,
            "needs": needs(task),
        }

    async def score(self, index: int, completion: str) -> dict[str, Any]:
        from verifiers.v1 import graph
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import AssistantMessage, UserMessage

        task = self._task(index)
        if needs(task):
            raise ValueError(f"it cannot be scored from text: {needs(task)}")
        trace: Any = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo(config=AgentConfig()),
        )
        trace.nodes = [
            graph.MessageNode(message=UserMessage(content=task.data.prompt_text)),
            graph.MessageNode(parent=0, message=AssistantMessage(content=completion), sampled=True),
        ]
        trace.root_reply = completion
        trace.is_completed = trace.ok = True
        await task.score(trace)
        return {"reward": trace.reward, "metrics": {name: value for name, value in trace.metrics.items()}}

    def _more(self) -> bool:
        row = next(self._iterator, None)
        if row is not None:
            self._rows.append(row)
        return row is not None

    def _task(self, index: int) -> Any:
        while index >= len(self._rows):
            if not self._more():
                raise IndexError(f"it has {len(self._rows)} rows")
        return self._rows[index]


def needs(task: Any) -> str:
    """Return a description of the things that scoring needs besides the text of the answer; "" if it needs nothing
    else."""
    if task.NEEDS_CONTAINER:
        return "a container"
    for kind in ("reward", "metric"):
        for hook in task.hooks(kind):
            runtime = inspect.signature(hook).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                return f"{hook.__name__} needs the runtime of the agent"
    return "an LLM judge" if task.config.judges else ""


async def handle(request: dict[str, Any], opened: list[Environment]) -> Any:
    """Carry out one request and return the result. `opened` contains the open environment; it is empty before the
    request "open"."""
    if request["do"] == "open":
        opened[:] = [Environment(request["environment"], request["settings"])]
        return opened[0].description()
    if request["do"] == "row":
        return opened[0].row(request["index"])
    return await opened[0].score(request["index"], request["completion"])


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    opened: list[Environment] = []
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            text = json.dumps({"id": request["id"], "ok": loop.run_until_complete(handle(request, opened))})
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is its answer
            text = json.dumps({"id": request["id"], "error": f"{type(error).__name__}: {error}"[:2000]})
        out.write(text + "\n")
        out.flush()


if __name__ == "__main__":
    main()
