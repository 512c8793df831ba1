"""The vision part of a stock transformers model, and nothing of its language model.

`vision_model` builds the stock base class (`Qwen2_5_VLModel`, `InternVLModel`, `Lfm2VlModel`, ...) on the meta device,
makes the named parts real, and drops every other weight, so that the stock `get_image_features` runs in the memory of
the tower and its projector. `load_vision_model` also fills the parts from a checkpoint: it reads the vision tensors out
of safetensors files and no others, and downloads only the shards that hold them. `random_weights_` fills them from a
seed.

Checkpoint names are mapped with the tables that `from_pretrained` uses (`transformers.conversion_mapping`), so old and
new layouts load alike: `visual.*`, `vision_tower.vision_model.*`, `model.visual.*`. What this file uses from the inside
of transformers is the same in versions 5.17 and 5.24.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from onereplay import models
from onereplay.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# As safetensors spells them. Narrower floats are quantised: they mean nothing without their scales.
_FLOATS = ("F64", "F32", "F16", "BF16")


# ---------------------------------------------------------------------------------------------------------------------
# Building
# ---------------------------------------------------------------------------------------------------------------------


def vision_model(
    config: PreTrainedConfig, *, device: torch.device | str, dtype: torch.dtype, parts: tuple[str, ...]
) -> PreTrainedModel:
    """The stock base model of `config` with only `parts` real, in eval mode and without gradients.

    The parameters of the parts are allocated, not initialised: fill them with `random_weights_` or
    `load_vision_weights_`. Buffers have the values and dtypes that `from_pretrained` gives them. Every other child that
    has weights, the language model first, is a placeholder that raises when it is called. The language model costs no
    tensor memory, and under 2 ms a layer to lay out on the meta device.

    Args:
        config: of the whole model; it is copied.
        device: where the parts live.
        dtype: of the parts' floating-point parameters.
        parts: names of sub-modules of the base model, such as `("vision_tower", "multi_modal_projector")`, and of
            parameters that it holds itself; `("",)` is all of it.

    Raises:
        UnsupportedModelError: transformers has no base model for `config`, or the model has no such part.
    """
    model = _on_meta(_base_class(config), copy.deepcopy(config), dtype)
    for name in parts:
        if name in model._parameters:
            empty = torch.empty(model._parameters[name].shape, dtype=dtype, device=device)
            model._parameters[name] = nn.Parameter(empty)
        else:
            _materialize(_part(model, name), name, torch.device(device), dtype)
    _drop_all_but(model, parts)
    return model.eval().requires_grad_(False)


class AbsentModule(nn.Module):
    """Stands where a sub-module was that has no weights here; calling it is an error that says so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Always raises `UnsupportedModelError`."""
        raise UnsupportedModelError(
            f"{self.name} was not loaded: this model holds its vision encoder only; "
            "use from_pretrained for the whole model"
        )


def _base_class(config: PreTrainedConfig) -> Any:
    """The class without a head; the whole one where transformers has no other (Qwen2.5-Omni in 5.17)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    headless = type(config) in MODEL_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return _mapped_class(MODEL_MAPPING if headless else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)


def _whole_class(config: PreTrainedConfig) -> Any:
    """With the language model's head, which knows how checkpoints are named; the base class where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return _base_class(config)
    return _mapped_class(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)


def _mapped_class(mapping: Any, config: PreTrainedConfig) -> Any:
    if type(config) not in mapping:
        raise UnsupportedModelError(
            f"transformers has no model for {type(config).__name__} (model_type {config.model_type!r})"
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _on_meta(model_class: Any, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        return model_class._from_config(config, dtype=dtype)


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as err:
        children = ", ".join(child for child, _ in model.named_children())
        raise UnsupportedModelError(f"{type(model).__name__} has no part {name!r}; it has {children}") from err


def _parameters(model: nn.Module, part: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a part by their full names; a part may be a parameter of the base model itself."""
    own = model._parameters.get(part)
    return list(_part(model, part).named_parameters(prefix=part)) if own is None else [(part, own)]


def _state(model: nn.Module, part: str) -> dict[str, Tensor]:
    """What a checkpoint has of a part, by full names."""
    own = model._parameters.get(part)
    return _part(model, part).state_dict(prefix=part and f"{part}.") if own is None else {part: own.data}


def _materialize(part: nn.Module, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate a meta part on `device` and give its buffers their values.

    Tables such as the rotary `inv_freq` are in no checkpoint: the constructor computes them. They come from a second
    instance on the CPU, where `from_pretrained` computes them too; the same formula on a GPU may round otherwise. The
    weights of that instance are never touched, so the system never backs them with memory.
    """
    values = _constructed_buffers(part, name, dtype)
    part.to_empty(device=device)
    for buffer_name, value in values.items():
        part.get_buffer(buffer_name).copy_(value)


def _constructed_buffers(part: nn.Module, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    if not any(True for _ in part.buffers()):
        return {}
    if not isinstance(part, PreTrainedModel):
        raise UnsupportedModelError(
            f"part {name!r} ({type(part).__name__}) has buffers and no configuration of its own to rebuild them from; "
            "name the PreTrainedModel that holds it"
        )
    with no_init_weights(), torch.device("cpu"):
        twin = type(part)._from_config(part.config, dtype=dtype)
    _initialize_stored_buffers(twin)
    return dict(twin.named_buffers())


def _initialize_stored_buffers(twin: Any) -> None:
    """Give the buffers that checkpoints hold the values of the model's own initialisation; constructors may leave them
    as they find them (Gemma 4's `std_scale`)."""
    for module in twin.modules():
        if module._buffers.keys() - module._non_persistent_buffers_set:
            twin._init_weights(module)


def _drop_all_but(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Replace the children that hold weights, unless they are a part or hold one, or all of the model is a part."""
    if "" in parts:
        return
    kept = {name.split(".")[0] for name in parts}
    for name, child in list(model.named_children()):
        if name not in kept and any(True for _ in child.parameters()):
            setattr(model, name, AbsentModule(name))


# ---------------------------------------------------------------------------------------------------------------------
# Random weights
# ---------------------------------------------------------------------------------------------------------------------


def random_weights_(model: nn.Module, parts: tuple[str, ...], seed: int = 0) -> None:
    """Fill the parameters of `parts` so that outputs are of order one and every parameter matters to them.

    Each parameter is drawn in float32 on its own device from `seed` and its full name, so neither the order of the
    parameters nor the other parts change it. A CPU and a GPU draw different numbers.

    Matrices and convolutions: normal, standard deviation 1 / sqrt(fan-in). Biases: 0.1. Norm weights: 1 + 0.1 x normal.
    Embeddings, position tables and class tokens: 0.5, enough that positions change the outputs. Layer scales: uniform
    in 0.1 to 0.3. Buffers that checkpoints hold, by how their names end: `_scale` as norm weights, `_bias` as biases,
    `_min` and `_max` about -3 and 3; others are left alone.
    """
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    for part in parts:
        known = set()
        for name, parameter in _parameters(model, part):
            known.add(name)
            kind = "table" if id(parameter) in tables else _kind(name, parameter)
            parameter.data.copy_(_draw(kind, parameter, _seed_of(name, seed)))
        for name, stored in _state(model, part).items():
            ending = name.rpartition("_")[2]
            if ending in _STORED and name not in known:
                stored.copy_(_draw(_STORED[ending], stored, _seed_of(name, seed)))


_STORED = {"scale": "norm", "bias": "bias", "min": "least", "max": "most"}
"""What a buffer is that a checkpoint holds, by how its name ends."""


def _kind(name: str, parameter: Tensor) -> str:
    leaf = name.rpartition(".")[2]
    if leaf.endswith("bias"):
        return "bias"
    if parameter.dim() > 1:
        return "matrix" if leaf.endswith("weight") else "table"  # `in_proj_weight` of PyTorch's attention too
    return "norm" if leaf == "weight" else "scale"


def _draw(kind: str, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    values = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    if kind == "scale":
        return values.uniform_(0.1, 0.3, generator=generator)
    values.normal_(generator=generator)
    match kind:
        case "matrix":
            return values.div_(math.sqrt(like[0].numel()))
        case "bias":
            return values.mul_(0.1)
        case "norm":
            return values.mul_(0.1).add_(1.0)
        case "least" | "most":
            return values.mul_(0.1).add_(3.0 if kind == "most" else -3.0)
        case _:
            return values.mul_(0.5)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def load_vision_model(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    parts: tuple[str, ...],
    revision: str | None = None,
) -> PreTrainedModel:
    """`vision_model` of a checkpoint, with its weights.

    Args:
        source: a local directory, or a hub id such as `Qwen/Qwen2.5-VL-7B-Instruct`.
        device: where the parts live.
        dtype: of the parts' floating-point parameters; the checkpoint's values are cast to it.
        parts: names of sub-modules of the base model.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: no such checkpoint, or its vision weights do not fit; see `load_vision_weights_`.
        UnsupportedModelError: transformers does not know the model, or the model has no such part.
    """
    config = load_config(source, revision=revision)
    model = vision_model(config, device=device, dtype=dtype, parts=parts)
    load_vision_weights_(model, source, parts, revision=revision)
    return model


def load_config(source: str | os.PathLike[str], *, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a checkpoint: a local directory or a hub id.

    Of a model of several models (Qwen2.5-Omni) it is that of the one with the encoders, the thinker.

    Raises:
        CheckpointError: no such checkpoint, or its `config.json` cannot be read.
        UnsupportedModelError: transformers does not know the model; code in the checkpoint is never run.
    """
    from transformers import AutoConfig

    models.register()
    path = _fetch(source, "config.json", revision)
    try:
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except ValueError as err:
        raise UnsupportedModelError(f"{source}: transformers has no such model: {err}") from err
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err}") from err
    return getattr(config, "thinker_config", config)


def load_vision_weights_(
    model: PreTrainedModel, source: str | os.PathLike[str], parts: tuple[str, ...], *, revision: str | None = None
) -> None:
    """Fill every parameter and persistent buffer of `parts` from the safetensors files of a checkpoint.

    Only the vision tensors are read, one at a time; of a sharded checkpoint only the shards that hold them are opened
    or downloaded. (A checkpoint in a single file on the hub is downloaded whole.)

    Raises:
        CheckpointError: the checkpoint does not exist, has no safetensors files, or a name or shape does not fit: a
            weight is missing, there is one too many under a part, one comes twice, has another shape, is quantised, or
            is to be made of several. The message has the name, the shapes and the file.
    """
    shards = _find_shards(source, revision)
    targets = {name: tensor for part in parts for name, tensor in _state(model, part).items()}
    loads = _match(shards, _renamed(model.config, shards, parts), targets, _ignored(model, parts))
    for file, tensors in _by_file(loads, shards).items():
        _read(_fetch(source, file, revision), tensors, targets)
    logger.info("read %d vision tensors of %s; left %d", len(loads), source, len(shards.file_of) - len(loads))


@dataclass(frozen=True, slots=True)
class _Shards:
    """Where the tensors of a checkpoint are: the file name of every tensor name."""

    source: str
    file_of: Mapping[str, str]


def _find_shards(source: str | os.PathLike[str], revision: str | None) -> _Shards:
    """The tensor names of a checkpoint, from the header of its one file or from its index; no tensor is read."""
    if (single := _find(source, _SINGLE, revision)) is not None:
        with _open(single, "cpu") as file:
            return _Shards(str(source), dict.fromkeys(file.keys(), _SINGLE))
    if (index := _find(source, _INDEX, revision)) is not None:
        return _Shards(str(source), _weight_map(index))
    for name in _PICKLED:
        if _find(source, name, revision) is not None:
            raise CheckpointError(
                f"{source} has {name} and no {_SINGLE}: only safetensors are read; "
                "convert it with from_pretrained(...).save_pretrained(...)"
            )
    unsure = "" if os.path.isdir(source) else " (or the hub could not be asked, and the cache has neither)"
    raise CheckpointError(f"{source} has neither {_SINGLE} nor {_INDEX}{unsure}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return {str(key): str(file) for key, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{index} is not an index of safetensors shards: {err!r}") from err


class _NoSuchFileError(CheckpointError):
    """The checkpoint, or the hub as far as it can be asked, has no file of that name."""


def _find(source: str | os.PathLike[str], name: str, revision: str | None) -> Path | None:
    """`_fetch`, or None where there is no such file."""
    try:
        return _fetch(source, name, revision)
    except _NoSuchFileError:
        return None


def _fetch(source: str | os.PathLike[str], name: str, revision: str | None) -> Path:
    """The local path of one file of a checkpoint, downloaded if it must be.

    Raises:
        CheckpointError: no such file, no such directory or hub id, or no way to the hub.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    if os.path.isdir(source):
        if (path := Path(source) / name).is_file():
            return path
        raise _NoSuchFileError(f"{source} has no file {name}")
    try:
        return Path(hf_hub_download(os.fspath(source), name, revision=revision))
    except EntryNotFoundError as err:
        raise _NoSuchFileError(f"{source} is not a directory, and no hub id that gives {name}: {err}") from err
    except (HFValidationError, OSError) as err:
        raise CheckpointError(f"{source} is neither a directory nor a hub id that can be read: {err}") from err


@dataclass(frozen=True, slots=True)
class _Load:
    """What one tensor of a checkpoint becomes: a weight under another name, or several made of its values."""

    names: tuple[str, ...]
    """In the base model."""
    convert: Callable[[Tensor], Mapping[str, Any]] | None = None
    """From the tensor to those of `names`; None where it is taken as it is."""


def _renamed(config: PreTrainedConfig, shards: _Shards, parts: tuple[str, ...]) -> dict[str, _Load]:
    """For every checkpoint name that belongs to a part, what it is in the base model.

    Source: `convert_and_load_state_dict_in_model` of transformers, `core_model_loading.py`: the names are taken in
    natural order (some renamings depend on names before them), every renaming applies, then at most one converter, then
    the prefix of the base model is put on or taken off; a name that was right before is left alone.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    whole = _on_meta(_whole_class(config), copy.deepcopy(config), torch.bfloat16)
    known, prefix = whole.state_dict(), whole.base_model_prefix
    own = type(whole) is _base_class(config) and any(name.startswith(f"{prefix}.") for name in known)
    within = "" if own else f"{prefix}."  # DINOv3's base model has a part of that name
    transforms = get_model_conversion_mapping(whole)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, _Load] = {}
    for key in sorted(shards.file_of, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        name = name.removeprefix(within)
        if not _belongs(name, parts, known, within):
            continue
        if pattern is not None and len(by_pattern[pattern].source_patterns) > 1:
            raise CheckpointError(
                f"{key} in {shards.file_of[key]} of {shards.source} is one of several tensors that make one "
                f"({pattern}), which is not supported; save the checkpoint again with transformers' save_pretrained"
            )
        renamed[key] = _Load((name,)) if pattern is None else _made(name, key, pattern, by_pattern[pattern], config)
    return renamed


def _made(name: str, key: str, pattern: str, converter: Any, config: PreTrainedConfig) -> _Load:
    """A tensor that transformers splits or permutes; `name` is that of the first result."""
    first, *others = converter.target_patterns

    def convert(tensor: Tensor) -> Mapping[str, Any]:
        fresh = copy.deepcopy(converter)
        fresh.add_tensor(name, key, pattern, tensor)
        found: Mapping[str, Any] = fresh.convert(name, config=config)
        return found

    return _Load((name, *(name.replace(first, other, 1) for other in others)), convert)


def _belongs(name: str, parts: tuple[str, ...], known: Mapping[str, Any], within: str) -> bool:
    """Whether a name of the base model is in a part. In a part that is all of it, only what one of its children would
    hold is: a checkpoint may have a classifier on top."""
    if "" in parts:
        return name.partition(".")[0] in {other.removeprefix(within).partition(".")[0] for other in known}
    return name in parts or name.startswith(tuple(f"{part}." for part in parts))


def _ignored(model: PreTrainedModel, parts: tuple[str, ...]) -> re.Pattern[str]:
    """What a checkpoint may have under a part without use: computed buffers, and what transformers ignores too."""
    persistent = {name for part in parts for name in _state(model, part)}
    computed = [
        re.escape(name)
        for part in parts
        if part not in model._parameters
        for name, _ in _part(model, part).named_buffers(prefix=part)
        if name not in persistent
    ]
    patterns = [rf"^{name}$" for name in computed] + list(model._keys_to_ignore_on_load_unexpected or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _match(
    shards: _Shards, renamed: Mapping[str, _Load], targets: Mapping[str, Tensor], ignored: re.Pattern[str]
) -> dict[str, _Load]:
    """What each tensor is loaded as, each target once; or the error that says which name does not fit."""
    loads: dict[str, _Load] = {}
    taken: dict[str, str] = {}
    for key, load in renamed.items():
        for name in load.names:
            if name in taken:
                raise CheckpointError(f"{shards.source} has {name} twice: {taken[name]} and {key}")
            if name in targets:
                loads[key], taken[name] = load, key
            elif not ignored.search(name):
                raise CheckpointError(
                    f"{key} in {shards.file_of[key]} of {shards.source} has no place in the model as {name}"
                )
    missing = [name for name in targets if name not in taken]
    if missing:
        shape = tuple(targets[missing[0]].shape)
        raise CheckpointError(
            f"{shards.source} has no {missing[0]} of shape {shape} in {_files(shards)}, "
            f"nor {len(missing) - 1} more of the {len(targets)} vision weights"
        )
    return loads


def _files(shards: _Shards) -> str:
    return ", ".join(sorted(set(shards.file_of.values()))) or "its empty index"


def _by_file(loads: Mapping[str, _Load], shards: _Shards) -> dict[str, dict[str, _Load]]:
    files: dict[str, dict[str, _Load]] = {}
    for key, load in loads.items():
        files.setdefault(shards.file_of[key], {})[key] = load
    return files


def _read(path: Path, tensors: Mapping[str, _Load], targets: Mapping[str, Tensor]) -> None:
    """Copy the tensors of one file into their targets, cast to the targets' dtypes."""
    device = str(targets[next(iter(tensors.values())).names[0]].device)
    with _open(path, device) as file:
        held = set(file.keys())
        for key, load in tensors.items():
            if key not in held:
                raise CheckpointError(f"{path} has no tensor {key}, against what {_INDEX} says")
            stored, shape = file.get_slice(key), tuple(file.get_slice(key).get_shape())
            _check_kind(key, stored, load.names[0], targets[load.names[0]], path)
            if load.convert is None:
                _fill(key, shape, {load.names[0]: file.get_tensor(key)}, targets, path)
                continue
            try:
                made = load.convert(file.get_tensor(key))
            except (RuntimeError, ValueError) as err:
                raise CheckpointError(f"{key} in {path} has shape {shape}; no {load.names} can be made of it") from err
            _fill(key, shape, {name: made[name] for name in load.names if name in targets}, targets, path)


def _fill(
    key: str, shape: tuple[int, ...], tensors: Mapping[str, Any], targets: Mapping[str, Tensor], path: Path
) -> None:
    for name, given in tensors.items():
        tensor = given[0] if isinstance(given, list) else given
        if tensor.shape != targets[name].shape:
            made = "" if tuple(tensor.shape) == shape else f", which makes {name} {tuple(tensor.shape)}"
            raise CheckpointError(
                f"{key} in {path} has shape {shape}{made}; {name} of the model has {tuple(targets[name].shape)}"
            )
        targets[name].copy_(tensor)


def _check_kind(key: str, stored: Any, name: str, target: Tensor, path: Path) -> None:
    if target.is_floating_point() != (stored.get_dtype() in _FLOATS):
        raise CheckpointError(
            f"{key} in {path} has dtype {stored.get_dtype()}; {name} of the model has {target.dtype}: "
            "quantised vision weights are not supported"
        )


@contextmanager
def _open(path: Path, device: str) -> Iterator[Any]:
    """`safetensors.safe_open` whose complaints are `CheckpointError`s that name the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError) as err:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {err}") from err
