"""Seconds of vLLM's CPU build on one thread: runs in vLLM's own virtual environment.

Started by `benchmarks.inference.engine --vllm DIR`, which writes a batch size on a line of standard input, and reads a
line of JSON with the wall and CPU seconds of that batch. The first line says which vLLM it is. Imports nothing of
etude, whose torch differs. The engine core lives in this process, so the CPU seconds are all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what vLLM prints
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm  # noqa: E402 - it prints while it is imported


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="a JSON file: batch size to a list of token lists")
    parser.add_argument("--sampled", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--mode", choices=["eager", "compiled"], required=True)
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
    print(json.dumps({"vllm": vllm.__version__}), file=ANSWERS)
    for line in sys.stdin:
        prompts = batches[int(line)]
        wall, cpu = time.perf_counter(), time.process_time()
        done = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        assert [len(one.outputs[0].token_ids) for one in done] == [args.sampled] * len(prompts)
        print(json.dumps(spent), file=ANSWERS)


if __name__ == "__main__":
    main()
