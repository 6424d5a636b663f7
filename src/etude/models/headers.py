"""Check a checkpoint directory against its config.json, from the headers of its files alone. Torch-free.

A safetensors file begins with a header (`weights.files.safetensors_file`): dtype, shape and place of each tensor. So
truncated files, missing tensors and wrong shapes are found in milliseconds, whatever the size of the model. Damaged
data is found when loading."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.errors import CheckpointError, ConfigError
from etude.models.adapter_config import base_of
from etude.models.components import Scores, Shape
from etude.models.config import ModelConfig
from etude.models.config_json import MTP_KEY
from etude.models.family_lookup import wrapped_family
from etude.models.quantised_storage import (
    FP8_DTYPE,
    FP8_SCALE,
    INT4_SCALE,
    Part,
    ignored_parts,
    int4_parts,
    is_int4,
    is_quantised,
    scale_shape,
    stored_format,
    stored_parts,
)
from etude.models.stacked_experts import BLOCKS, PLAIN_STACK, expert_part, plain_shapes, stacked_parts, stacked_shapes
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS
from etude.weights.files import safetensors_file
from etude.weights.files.checkpoint import INDEX, WEIGHTS, read_index

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
READABLE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
HINT_DAMAGED = "copy the checkpoint again; or, if it is a run's newest, delete it: --resume uses the one before"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by its file's header. `dtype`: the header's name, such as "BF16"."""

    file: Path
    dtype: str
    shape: Shape


def read_model_config(folder: Path) -> ModelConfig:
    """Read the model of a checkpoint directory, whose config.json may say more MTP heads than the files have.

    transformers leaves out the tensors of MTP heads, and keeps their number: such a model has no heads. Raises
    `CheckpointError` when a file is missing or damaged, or the architecture is not supported."""
    config = ModelConfig.from_hf(read_json(folder / "config.json"))
    return without_missing_heads(config, read_headers(folder)) if config.mtp_heads else config


def without_missing_heads(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Return the config of a model, without MTP heads if none of their tensors is among `names`."""
    outside, layers = config.architecture.hf_name, range(config.num_layers, config.num_layers + config.mtp_heads)
    heads = tuple(outside(f"model.layers.{layer}.") for layer in layers)
    return config if any(name.startswith(heads) for name in names) else replace(config, mtp_heads=0)


def check_weights(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Check that a checkpoint directory has exactly the tensors of a model. Returns these by name.

    Raises `CheckpointError`, which names file, tensor, and found and expected shape."""
    found = read_headers(folder)
    for error in weight_errors(folder, found, config):
        raise error
    return found


def weight_errors(folder: Path, found: Mapping[str, StoredTensor], config: ModelConfig) -> Iterator[CheckpointError]:
    """Yield an error for each tensor of a model that is missing or does not fit, then one for each other tensor.

    `found`: the tensors of the directory `folder`."""
    known = {config.architecture.hf_name(HEAD)}  # some writers repeat a tied one: the loader compares it
    known |= {part for name in mtp_copies(config) for part in (name, name + FP8_SCALE)}
    for name, shape in stored_shapes(found, config):
        try:
            known |= _check_tensor(name, found, shape, folder)
        except CheckpointError as error:
            known |= {name, name + FP8_SCALE}
            yield error
    extra = sorted(found.keys() - known - config.architecture.unused(found, config))
    for name in extra:
        yield CheckpointError(
            f"{found[name].file} has a tensor {name!r}",
            f"one of {len(extra)} that do not belong to the model of {folder / 'config.json'}",
            hint="config and weights are of different models: take both from one checkpoint",
        )


def check_blocks(config: ModelConfig, kind: Quantise) -> None:
    """Raise `ConfigError` when a large matrix has a width that is not a multiple of a format's block size."""
    outside = config.architecture.hf_name
    for name, shape in weight_shapes(config):
        if is_quantised(name) and kind is not Quantise.NONE and shape[-1] % FORMATS[kind].block:
            block = FORMATS[kind].block
            raise ConfigError(
                f"numerics.quantise = {str(kind)!r} is not possible",
                f"the width of {outside(name)} {list(shape)} is not a multiple of the block size {block}",
                hint=f'use model widths that are multiples of {block}, or set numerics.quantise = "none"',
            )


def check_rank(config: ModelConfig, rank: int) -> None:
    """Raise `ConfigError` when a LoRA adapter of this rank would have more numbers than the adapted matrix."""
    outside = config.architecture.hf_name
    for name, shape in weight_shapes(config):
        if is_quantised(name) and rank > (most := math.prod(shape) // sum(shape)):
            raise ConfigError(
                f"learner.lora_rank = {rank} is too large",
                f"{outside(name)} is {list(shape)}: an adapter of rank above {most} is not smaller than the matrix",
                hint="lower it: 1 to 32 are usual; or set learner.lora_rank = 0 to train all weights",
            )


def unused_layers(folder: Path, config: ModelConfig) -> dict[str, int]:
    """Return the layers and other parts of a directory that etude does not compute with, with their number of tensors.

    They are lost when the weights are saved again. Raises `CheckpointError` when a header cannot be read."""
    names = config.architecture.unused(read_headers(folder), config)
    begins = config.architecture.skipped

    def part(name: str) -> str:
        begin = next((begin for begin in begins if name.startswith(begin)), None)
        return ".".join(name.split(".", 3)[:3]) if begin is None else begin.removesuffix(".")

    return dict(Counter(sorted(map(part, names))))


def report_unused_layers(folder: Path, config: ModelConfig, report: Callable[[str], None]) -> None:
    """Call `report` with a message if the directory has layers, or a vision model, that are dropped
    (`unused_layers`)."""
    layers = unused_layers(folder, config)
    others = {name: layers.pop(name) for name in list(layers) if f"{name}." in config.architecture.skipped}
    why = f"since config.json has {MTP_KEY} = {config.mtp_heads}"
    for parts, reason in ((layers, why), (others, "since they are no part of the text model that etude computes")):
        if parts:
            named = ", ".join(f"{part} ({tensors} tensors)" for part, tensors in parts.items())
            report(
                f"{folder}: dropped, {reason}: {named}. They are not trained, and not part of checkpoints and exports"
            )


def _check_tensor(name: str, found: Mapping[str, StoredTensor], shape: Shape, folder: Path) -> set[str]:
    """Check one tensor, and return the names under which it is stored."""
    if is_int4(name, found):
        return _check_int4(name, found, shape)
    low = stored_format(name, found)
    if low is not Quantise.NONE:
        whole = len(shape) == 2 and shape[1] % FORMATS[low].block == 0
        return _check_parts(name, found, shape, low, stored_parts(name, shape, low) if whole else {})
    if name + BLOCKS in found:
        return _check_parts(name, found, shape, Quantise.MXFP4, stacked_parts(name, shape))
    tensor = found.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{folder} has no tensor {name!r}", f"its config.json expects {list(shape)}", hint=HINT_DAMAGED
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: {name!r} has shape {list(tensor.shape)}",
            f"{folder / 'config.json'} expects {list(shape)}",
            hint="config and weights are of different models: take both from one checkpoint",
        )
    if tensor.dtype == FP8_DTYPE and len(shape) == 2:
        scale = found.get(name + FP8_SCALE)
        if scale is None or scale.shape != scale_shape(shape) or scale.dtype != "F32":
            raise CheckpointError(
                f"{tensor.file}: {name!r} is {FP8_DTYPE} without its scales",
                f"{name + FP8_SCALE!r} must be F32 {list(scale_shape(shape))}, {_described(scale)}",
                hint="etude reads only DeepSeek's blocks of 128 × 128: convert the checkpoint to bf16 first",
            )
    elif tensor.dtype not in READABLE_BYTES:
        raise CheckpointError(
            f"{tensor.file}: {name!r} is {tensor.dtype}",
            f"etude reads {', '.join(READABLE_BYTES)}, {FP8_DTYPE} matrices with their block scales, and matrices in "
            f"{', '.join(FORMATS)} as compressed-tensors stores them",
            hint="convert the checkpoint to bf16 first",
        )
    return {name, name + FP8_SCALE} if tensor.dtype == FP8_DTYPE else {name}


def _check_parts(
    name: str, found: Mapping[str, StoredTensor], shape: Shape, low: Quantise, expected: Mapping[str, Part]
) -> set[str]:
    """Check the tensors that store a quantised one, and return their names. `expected`: empty if it cannot be."""
    for part, (dtype, its_shape) in expected.items():
        tensor = found.get(part)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, its_shape):
            raise CheckpointError(
                f"{part!r} does not fit the {low} matrix {name!r} of shape {list(shape)}",
                f"it must be {dtype} {list(its_shape)}, {_described(tensor)}",
                hint="export it again, or convert the checkpoint to bf16 first",
            )
    if not expected:
        raise CheckpointError(
            f"{name!r} of shape {list(shape)} cannot be stored in {low}",
            f"its width is not a multiple of the block size {FORMATS[low].block}",
            hint="config and weights are of different models: take both from one checkpoint",
        )
    return {*expected, *ignored_parts(name, low)}


def _check_int4(name: str, found: Mapping[str, StoredTensor], shape: Shape) -> set[str]:
    """Check the tensors that store an int4 matrix, and return their names."""
    scale = found.get(name + INT4_SCALE.removeprefix(".weight"))
    groups = scale.shape[-1] if scale is not None and scale.dtype in READABLE_BYTES and len(scale.shape) == 2 else 0
    expected = int4_parts(name, shape, groups) if len(shape) == 2 else {}
    for part, (dtype, its_shape) in expected.items():
        tensor = found.get(part)
        kind = tensor.dtype if tensor is not None and dtype == "BF16" and tensor.dtype in READABLE_BYTES else dtype
        if tensor is None or (tensor.dtype, tensor.shape) != (kind, its_shape):
            raise CheckpointError(
                f"{part!r} does not fit the int4 matrix {name!r} of shape {list(shape)}",
                f"it must be {dtype} {list(its_shape)}, {_described(tensor)}",
                hint="copy or download the checkpoint again, or convert it to bf16 first",
            )
    if not expected:
        raise CheckpointError(
            f"{name!r} of shape {list(shape)} cannot be stored in int4",
            f"it has {f'{groups} groups' if groups else 'no scales'} for a width of {shape[-1]}: expected groups of "
            "equal width, and eight numbers for each word",
            hint="copy or download the checkpoint again, or convert it to bf16 first",
        )
    return set(expected)


def _described(tensor: StoredTensor | None) -> str:
    return "but it is missing" if tensor is None else f"but is {tensor.dtype} {list(tensor.shape)}"


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield etude's name (`weight_views.views`) and shape of every weight of a model.

    It is an iterator, since an invalid config may describe very many weights."""
    d = config.hidden_size
    yield EMBEDDING, (config.vocab_size, d)
    for layer in range(config.num_layers):
        yield from _layer_shapes(config, layer)
    yield "model.norm.weight", (d,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, d)
    for layer in range(config.num_layers, config.num_layers + config.mtp_heads):
        at = f"model.layers.{layer}."
        yield from ((f"{at}{name}.weight", (d,)) for name in ("enorm", "hnorm", "shared_head.norm"))
        yield at + "eh_proj.weight", (d, 2 * d)
        yield from _layer_shapes(config, layer)


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tensors of a checkpoint that repeat weights of the trunk in each MTP head: Hugging Face name → that
    of the trunk's tensor.

    Such tensors are written where the family has them (`ModelFamily.copies_for_mtp`), and are never read."""
    outside, found = config.architecture.hf_name, dict[str, str]()
    for layer in range(config.num_layers, config.num_layers + config.mtp_heads):
        found[outside(f"model.layers.{layer}.embed_tokens.weight")] = outside(EMBEDDING)
        head = EMBEDDING if config.tie_embeddings else HEAD
        found[outside(f"model.layers.{layer}.shared_head.head.weight")] = outside(head)
    return found


def hf_weight_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name in the family's Hugging Face checkpoints and the shape of every weight of a model."""
    outside = config.architecture.hf_name
    return ((outside(name), shape) for name, shape in weight_shapes(config))


def stored_shapes(found: Iterable[str], config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of every tensor that a checkpoint of a model must have. In some checkpoints, experts are
    stacked in one tensor.

    `found`: the names in the checkpoint. They decide whether experts are stacked: a learner with several ranks writes
    each expert as a tensor of its own, in every family."""
    found, family = set(found), config.architecture
    stacked = family.stacks_experts and not any(expert_part(name) for name in found)
    if family.plain_stacks:
        stacked = any(name.endswith(PLAIN_STACK) for name in found)
    if not stacked:
        yield from hf_weight_shapes(config)
        return
    yield from (pair for pair in hf_weight_shapes(config) if expert_part(pair[0]) is None)
    outside = config.architecture.hf_name
    shapes = stacked_shapes if family.stacks_experts else plain_shapes
    for layer in config.moe_layers:
        yield from shapes(outside(f"model.layers.{layer}.mlp.experts."), config)


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    d, at = config.hidden_size, f"model.layers.{layer}."
    yield at + "input_layernorm.weight", (d,)
    yield from ((f"{at}self_attn.{name}", shape) for name, shape in config.attention_of(layer).shapes(config).items())
    yield at + "post_attention_layernorm.weight", (d,)
    if config.has_router(layer):
        yield from _expert_shapes(config, at)
    else:
        yield from _mlp_shapes(at + "mlp.", d, config.dense_width)


def _expert_shapes(config: ModelConfig, at: str) -> Iterator[tuple[str, Shape]]:
    d, hidden, bias = config.hidden_size, config.expert_size, config.architecture.expert_bias
    yield at + "mlp.gate.weight", (config.num_experts, d)
    if bias:
        yield at + "mlp.gate.bias", (config.num_experts,)
    if config.routing.scores is Scores.SIGMOID:
        yield at + "mlp.gate.e_score_correction_bias", (config.num_experts,)
    for e in range(config.num_experts):
        yield from _mlp_shapes(f"{at}mlp.experts.{e}.", d, hidden, bias=bias)
    if config.num_shared:
        yield from _mlp_shapes(at + "mlp.shared_experts.", d, config.num_shared * hidden)
    if config.architecture.shared_gate:
        yield at + "mlp.shared_expert_gate.weight", (1, d)


def _mlp_shapes(at: str, width: int, hidden: int, *, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    for name, shape in (("gate", (hidden, width)), ("up", (hidden, width)), ("down", (width, hidden))):
        yield f"{at}{name}_proj.weight", shape
        if bias:
            yield f"{at}{name}_proj.bias", shape[:1]


def read_json(path: Path) -> dict[str, object]:
    """Read the JSON object in a file. Raises `CheckpointError` when the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint at {path.parent}",
            f"{path.name} cannot be read: {error.strerror}",
            hint="give a Hugging Face directory, with config.json and *.safetensors",
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged", "not a JSON object", hint=HINT_DAMAGED)
    return content


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all tensors of a directory, in one file or in shards with an index.

    For an adapter directory, the headers of its base are read. Names are those of the text model. Raises
    `CheckpointError` for a missing or damaged file."""
    folder = base_of(folder)
    tensors: dict[str, StoredTensor] = {}
    if not (folder / INDEX).is_file():
        tensors = read_header(folder / WEIGHTS)
    else:
        for shard in shard_names(folder / INDEX):
            tensors |= read_header(folder / shard, listed_in=folder / INDEX)
    inside = text_names(folder)
    return {inside(name): tensor for name, tensor in tensors.items()}


def text_names(folder: Path) -> Callable[[str], str]:
    """Return the function from the name of a tensor in a directory to its name as part of the text model
    (`ModelFamily.wrappers`)."""
    family = wrapped_family(read_json(folder / "config.json"))
    return (lambda name: name) if family is None else family.text_name


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index file lists, sorted.

    Raises `CheckpointError` when the index is missing or damaged."""
    return sorted(set(read_index(index, hint=HINT_DAMAGED)[1].values()))


def read_header(path: Path, *, listed_in: Path | None = None) -> dict[str, StoredTensor]:
    """Read the header of one safetensors file: tensor name → dtype and shape.

    `listed_in`: the index that lists the file, for a shard. Raises `CheckpointError` for a missing, truncated or
    damaged file."""
    if not path.is_file():
        hint = "a checkpoint directory has config.json and model.safetensors, or its shards with their index"
        if listed_in is not None:
            facts, hint = f"{listed_in} lists it", "copy or download that shard again"
            raise CheckpointError(f"no shard at {path}", facts, hint=hint)
        raise CheckpointError(f"no weights at {path}", hint=hint)
    _, places = safetensors_file.read_header(path, hint_damaged=HINT_DAMAGED)
    return {name: StoredTensor(path, place.dtype, place.shape) for name, place in places.items()}
