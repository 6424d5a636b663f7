"""The commands ``etude models list`` and ``check``."""

from __future__ import annotations

import argparse
from collections import Counter

from etude.dashboard.formatting import number, size
from etude.errors import Exit
from etude.inference.external.environment import SERVER_KINDS
from etude.models.config import ModelConfig, ModelFamily
from etude.models.config_json import MTP_KEY
from etude.models.family_lookup import FAMILY_NAMES, family_of, own_family_names
from etude.models.headers import unused_layers
from etude.models.inspection import Inspection, inspect
from etude.plan.arithmetic import active_parameters, kv_bytes_token, state_bytes

MOST_LINES = 12
"""Problems that `check` prints; the others are counted."""
TOKENISER = ("tokenizer.json", "a run and `etude serve` need it")


def list_families(args: argparse.Namespace) -> int:
    """Print every model family with its settings, and with the kinds of parallelism and engines it works with.

    The settings are those that may vary, and those that are refused. Returns 0."""
    for name in (*FAMILY_NAMES, *own_family_names()):
        family = family_of(name)
        rows = {
            "about": (type(family).__doc__ or "").partition("\n")[0],
            "may vary": f"sizes, {family.varies}, RoPE: plain, YaRN or llama3",
            "refused": ", ".join(_refused(family)),
            "ranks": _ranks(family.tiny()),
            "engines": _engines(family.tiny()),
        }
        print(f"{name}: {family.hf_class}")
        for key, value in rows.items():
            print(f"  {key:<10} {value}")
    print("to add a family of your own, see docs/guides/your-checkpoint.md")
    return Exit.DONE


def check(args: argparse.Namespace) -> int:
    """Print what a checkpoint directory contains, and everything that etude cannot use in it. Reads no weights.

    Returns exit code 1 if it finds anything that etude cannot use."""
    found = inspect(args.folder)
    problems = [str(error).partition("\n")[0] for error in found.problems]
    if not (found.folder / TOKENISER[0]).is_file():
        problems.append(f"there is no {TOKENISER[0]}: {TOKENISER[1]}")
    for key, value in _described(found).items():
        print(f"{key:<10} {value}")
    for problem in problems[:MOST_LINES]:
        print(f"problem    {problem}")
    if len(problems) > MOST_LINES:
        print(f"           and {len(problems) - MOST_LINES} more")
    print(f"etude cannot use {args.folder}: {number(len(problems), 'problem')}" if problems else "etude can use it")
    return Exit.FAILED if problems else Exit.DONE


def _described(found: Inspection) -> dict[str, str]:
    """Return the lines about a directory, by their first word."""
    family, c = found.family, found.config
    lines = {"family": f"{family.name} ({family.hf_class})"}
    if c is not None:
        lines["model"] = _sizes(c)
        lines["kv cache"] = f"{size(kv_bytes_token(c))} per token in bf16"
        if c.yarn is not None and c.yarn.factor * c.yarn.original_tokens != c.context_tokens:
            lines["remark"] = (
                f"YaRN's factor {c.yarn.factor:g} times {c.yarn.original_tokens} tokens is not the "
                f"{c.context_tokens} of max_position_embeddings, which is the context"
            )
    if found.tensors:
        files = {tensor.file for tensor in found.tensors.values()}
        kinds = Counter(tensor.dtype for tensor in found.tensors.values())
        named = ", ".join(f"{count} {dtype}" for dtype, count in kinds.most_common())
        total = size(sum(file.stat().st_size for file in files))
        lines["weights"] = f"{number(len(files), 'file')}, {total}; tensors: {named}"
        layers = {} if c is None else unused_layers(found.folder, c)
        if layers:
            dropped = ", ".join(f"{layer} ({number(count, 'tensor')})" for layer, count in layers.items())
            heads = f": config.json has {MTP_KEY} = {c.mtp_heads if c else 0}"
            lines["dropped"] = dropped + (heads if any(layer.startswith("model.layers.") for layer in layers) else "")
    sizes = family.tiny() if c is None else c
    return lines | {"ranks": _ranks(sizes), "engines": _engines(sizes)}


def _sizes(c: ModelConfig) -> str:
    words = [f"{c.num_parameters / 1e9:.3g} B parameters, {active_parameters(c) / 1e9:.3g} B active"]
    words.append(f"{c.num_layers} layers, width {c.hidden_size}")
    if c.mtp_heads:
        words.append(f"{number(c.mtp_heads, 'MTP head')} with {c.mtp_parameters / 1e9:.3g} B parameters")
    if c.num_experts:
        shared = f" and {c.num_shared} shared" if c.num_shared else ""
        words.append(f"{c.num_moe_layers} with {c.num_experts} experts, {c.top_k}{shared} per token")
    words.append(f"{c.num_heads} heads, {c.cache_layout.heads} of keys and values")
    if c.linear is not None:
        kept = f"a state of {size(state_bytes(c))} for each sequence"
        words.append(f"{number(len(c.linear_layers), 'gated delta layer')} of {c.linear.value_heads} heads, {kept}")
    words.append(f"{c.context_tokens} positions")
    if c.latent is not None and c.latent.indexer is not None:
        words.append(f"each token attends to {c.latent.indexer.top_k} keys, which an indexer chooses")
    return "; ".join(words)


def _refused(family: ModelFamily) -> list[str]:
    """Return what `from_hf` refuses by its key, as words."""
    found = [f"{key} other than {supported!r}" for key, (supported, _) in family.fixed.items()]
    found += [f"{key} other than {supported!r}" for key, supported in family.each.items()]
    partial = [] if "rotary_dim" in family.options else ["partial_rotary_factor other than 1"]
    return [*found, *partial, "other rope_type"]


def _ranks(c: ModelConfig) -> str:
    why = c.undivided
    kinds = ["data", *(["expert"] if c.num_experts else []), *([] if why else ["tensor"])]
    return f"{', '.join(kinds)} parallelism" + (f"; not tensor parallelism: {why}" if why else "")


def _engines(c: ModelConfig) -> str:
    why = {kind.name: c.architecture.unserved(c, key) for key, kind in SERVER_KINDS.items()}
    can = ", ".join(["reference", *(name for name, reason in why.items() if not reason)])
    return "; ".join([can, *(f"not {name}: it {reason}" for name, reason in why.items() if reason)])
