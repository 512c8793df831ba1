"""Checkpoints as publishers name them: several shards, a language model in between, and what does not fit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_shards: int = 3
) -> Path:
    """A sharded checkpoint of these tensors, dealt out in turn.

    Args:
        folder: an existing directory.
        config: the content of `config.json`.
        tensors: by published name.
        num_shards: how many files.
    """
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
    files = {key: names[place % num_shards] for place, key in enumerate(sorted(tensors))}
    for name in names:
        held = {key: tensors[key].contiguous() for key in tensors if files[key] == name}
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random values of order `1 / sqrt(fan-in)`; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in sorted(shapes.items()):
        values = torch.randn(shape, generator=generator)
        scale = 0.1 if len(shape) < 2 else float(torch.tensor(shape[1:]).prod()) ** -0.5
        found[name] = values * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return found
