"""Answers as the gateway offers them to its recorder."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from etude.records import Completion, Version, VersionSpan
from etude.records.completion import Sampling, StopReason
from etude.records.served import ServedAnswer

VERSION = Version(7, "0a1b2c3d", "ab" * 32)


def served_answer(
    user: str = "", *, organisation: str = "acme", said: str = "hello", at: float | None = None, **changes: Any
) -> ServedAnswer:
    ids = np.frombuffer(said.encode(), np.uint8).astype(np.int32)
    completion = Completion(
        request_id="r",
        token_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
        routes=np.zeros((0, 0, 0), np.uint8),
        routes_start=0,
        spans=(VersionSpan(VERSION, len(ids)),),
        stop_reason=StopReason.STOP,
        engine="e",
    )
    fields: dict[str, Any] = {
        "response_id": "ab" * 16,
        "index": 0,
        "model": "laptop",
        "dialect": "chat",
        "messages": [{"role": "user", "content": f"say {said}"}],
        "reply": {"role": "assistant", "content": said},
        "finish": "stop",
        "prompt_ids": np.arange(5, dtype=np.int32),
        "sampling": Sampling(max_tokens=64, stop_token_ids=(0,)),
    }
    at = time.time() if at is None else at
    return ServedAnswer(**fields | changes, organisation=organisation, user=user, at=at, completion=completion)
