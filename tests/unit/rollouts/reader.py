"""A policy for the tasks of examples/long that knows only what its prompt says: it has no memory of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from examples.long.tasks import FILE, summary

from etude.capture.context import REQUEST
from etude.harness import Call, ChatFormat
from etude.records import Completion, CompletionRequest
from etude.records.completion import StopReason, VersionSpan
from etude.testing import make_version


@dataclass
class Reader:
    """Reads the logs in order and writes their keys into the file, then submits. Asked for a summary, it writes one.

    `carries`: whether its summaries have what it has found. `says`: token ids in place of its summaries. `texts`: the
    prompts, as text."""

    chat: ChatFormat
    num_logs: int
    carries: bool = True
    says: list[int] | None = None
    texts: list[str] = field(default_factory=list)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return the next turn of the model, from the prompt alone."""
        self.texts.append(self.chat.readable(request.prompt_ids).rstrip())
        ids = self._turn(self.texts[-1])[: request.sampling.max_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            routes=np.zeros((0, 1, 1), np.uint8),
            routes_start=len(request.prompt_ids) + len(ids) - 1,
            spans=(VersionSpan(make_version(0), len(ids)),),
            stop_reason=StopReason.STOP if ids[-1] == self.chat.end_id else StopReason.LENGTH,
            engine="reader",
        )

    def _turn(self, text: str) -> np.ndarray:
        at, keys, written = 0, dict[int, str](), False
        if (known := re.search(r"^read (\d+) keys(.*)$", text, re.MULTILINE)) is not None:
            at = int(known[1])
            keys = {n - len(known[2].split()): key for n, key in enumerate(known[2].split())}
        written = re.search(r"^written$", text, re.MULTILINE) is not None
        for part in re.split(r"^\[", text, flags=re.MULTILINE):
            written |= part.startswith(f"call] edit {FILE}")
            if (log := re.match(r"tool\] 1 log (\d+)\n", part)) is not None:
                at = int(log[1])
                if (key := re.search(r"^\d+ key (\w+)$", part, re.MULTILINE)) is not None:
                    keys[at] = key[1]
        if text.endswith(f"{REQUEST}\n[assistant]"):
            if self.says is not None:
                return np.array(self.says, np.int32)
            said = "written" if written else summary(at, keys) if self.carries else "read some logs"
            return np.append(self.chat.encode(said), np.int32(self.chat.end_id))
        if written:
            return self.chat.encode_call(Call("submit", {}))
        if at < self.num_logs:
            return self.chat.encode_call(Call("cat", {"path": f"{at + 1}.log"}))
        text = f'return "{" ".join(keys.values())}"'
        return self.chat.encode_call(Call("edit", {"path": FILE, "line": "2", "text": text}))
