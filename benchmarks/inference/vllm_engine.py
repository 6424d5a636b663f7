"""Tokens a second of vLLM's CPU build on one thread: runs in vLLM's own virtual environment, prints JSON rows.

Started by `benchmarks.inference.engine --vllm DIR`; imports nothing of etude, whose torch differs. The engine core
lives in this process, so the CPU seconds are all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="a JSON file: batch size to a list of token lists")
    parser.add_argument("--sampled", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--mode", choices=["eager", "compiled"], required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with open(args.prompts) as file:
        batches = {int(size): prompts for size, prompts in json.load(file).items()}
    engine = vllm.LLM(
        args.model,
        dtype=args.dtype,
        enforce_eager=args.mode == "eager",
        skip_tokenizer_init=True,
        max_model_len=len(batches[max(batches)][0]) + args.sampled,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        seed=0,
    )
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=args.sampled, ignore_eos=True, detokenize=False)
    rows = []
    for size, prompts in batches.items():
        best = [0.0, 0.0]
        for _ in range(args.repeats + 1):  # the first one warms up, and compiles where it does
            wall, cpu = time.perf_counter(), time.process_time()
            done = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            assert [len(o.outputs[0].token_ids) for o in done] == [args.sampled] * size
            best = [max(b, size * args.sampled / s) for b, s in zip(best, spent, strict=True)]
        rows.append({"batch": size, "tokens_per_s": round(best[0], 1), "tokens_per_cpu_s": round(best[1], 1)})
    with open(args.out, "w") as file:
        json.dump({"vllm": vllm.__version__, "dtype": args.dtype, "mode": args.mode, "rows": rows}, file)


if __name__ == "__main__":
    main()
