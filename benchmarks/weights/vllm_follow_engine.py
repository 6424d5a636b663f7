"""vLLM's side of `benchmarks.weights.vllm_follow`: runs in vLLM's own environment, writes JSON.

The engine core lives in this process, so that its steps are seen one by one; the worker extension is called as it would
be over any number of processes. Without `--follow` it only scores the text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm

STREAMS, PROMPT_TOKENS, SAMPLED_TOKENS, SCORED_TOKENS, GREEDY_TOKENS = 8, 32, 192, 256, 32
TEXT = [(7 * i * i + 3 * i) % 4096 for i in range(SCORED_TOKENS)]


def score(engine: Any) -> list[float]:
    """The log-probability of each token of a fixed text, but the first, and of those that are sampled after it."""
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=GREEDY_TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=0, detokenize=False
    )
    (done,) = engine.generate([{"prompt_token_ids": TEXT}], sampling, use_tqdm=False)
    (answer,) = done.outputs
    scored = zip([*TEXT[1:], *answer.token_ids], [*done.prompt_logprobs[1:], *answer.logprobs], strict=True)
    return [found[token].logprob for token, found in scored]


def serve(engine: Any, num_versions: int, out: Path) -> dict[str, Any]:
    """Keep completions in flight until the last version was adopted and all that were in flight have ended."""
    core, started, finished, sampled, crossed = engine.llm_engine, 0, 0, 0, 0
    steps: list[tuple[float, bool]] = []  # seconds from one step's end to the next one's, and whether a swap was in it
    adopted: list[dict[str, Any]] = []
    began: dict[str, int] = {}  # which version a completion began with
    last, wrong = time.perf_counter(), list[str]()
    while len(adopted) <= num_versions or began:
        while len(began) < STREAMS and len(adopted) <= num_versions:
            prompt = [(31 * started + i) % 4096 for i in range(PROMPT_TOKENS)]
            sampling = vllm.SamplingParams(
                temperature=1.0, seed=started, max_tokens=SAMPLED_TOKENS, ignore_eos=True, detokenize=False
            )
            core.add_request(str(started), {"prompt_token_ids": prompt}, sampling)
            began[str(started)] = len(adopted)
            started += 1
        swapped = False
        if len(adopted) <= num_versions:
            engine.collective_rpc("etude_prepare")
            if engine.collective_rpc("etude_prepared")[0]:
                adopted += engine.collective_rpc("etude_adopt")
                swapped = True
        for answer in core.step():
            if answer.finished:
                finished += 1
                sampled += len(answer.outputs[0].token_ids)
                crossed += began.pop(answer.request_id) < len(adopted)
        now = time.perf_counter()
        steps.append((now - last, swapped))
        last = now
        if swapped:
            wrong += engine.collective_rpc("etude_check")[0]
            (out.parent / f"{out.name}.{len(adopted) - 1}").touch()
            last = time.perf_counter()
    usual = median(seconds for seconds, swap in steps if not swap)
    late = sorted([seconds - usual for seconds, swap in steps if swap][1:])  # the first wrote everything
    pauses = sorted(one["pause_s"] for one in adopted[1:])
    return {
        "adopted": len(adopted),
        "wrong_tensors": len(wrong),
        "requests": {"finished": finished, "over_a_swap": crossed, "failed": started - finished},
        "sampled_tokens": sampled,
        "all_complete": sampled == finished * SAMPLED_TOKENS,
        "step_s": round(usual, 5),
        "first_pause_s": round(adopted[0]["pause_s"], 5),
        "pause_s": {"p50": round(median(pauses), 5), "max": round(pauses[-1], 5)},
        "extra_gap_s": {"p50": round(median(late), 5), "max": round(late[-1], 5)},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--follow", default="")
    parser.add_argument("--versions", type=int, default=0)
    args = parser.parse_args()
    engine = vllm.LLM(
        args.model,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=STREAMS,
        enable_prefix_caching=False,
        seed=0,
        worker_extension_cls="etude.weights.follow.vllm_worker.WorkerExtension",
    )
    found: dict[str, Any] = {"vllm": vllm.__version__, "scores_before": score(engine)}
    if args.follow:
        engine.collective_rpc("etude_follow", args=(args.follow,))
        found |= serve(engine, args.versions, args.out)
    found["scores"] = score(engine)
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
