"""The image processor of a model, found without importing what is not installed."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.image_processing_auto import AutoImageProcessor, get_image_processor_config

from onereplay.errors import CheckpointError, ConfigError, MissingDependencyError


def load_image_processor(source: str | Path | Mapping[str, Any], **hub_options: Any) -> Any:
    """The image processor of a model, as transformers defines it.

    The class is the one that the configuration names, in its torchvision variant where torchvision is installed and in
    its PIL variant otherwise. It is looked up by name and not through `transformers.AutoImageProcessor`, because
    transformers 5.17 hides that class when torchvision is absent.

    Args:
        source: a local directory, a hub id, or the content of a `preprocessor_config.json` as a mapping.
        hub_options: for a hub id: `revision`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        CheckpointError: the directory or the hub repository has no image processor that transformers knows.
        ConfigError: the mapping does not name an image processor that transformers knows, or has values that it
            refuses.
        MissingDependencyError: this processor exists only for torchvision (LFM2-VL), and torchvision is absent.
    """
    if isinstance(source, Mapping):
        if "image_processor_type" not in source:
            raise ConfigError(
                f"image processor: image_processor_type is missing; there is {', '.join(source) or 'no key'}"
            )
        return _build(dict(source), ConfigError, "image processor")
    config = _read_config(source, hub_options)
    if "image_processor_type" in config:
        return _build(config, CheckpointError, str(source))
    try:  # Old checkpoints name no class; transformers derives it from the model's configuration.
        return AutoImageProcessor.from_pretrained(str(source), **hub_options)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{source}: no image processor: {err}") from err


def _read_config(source: str | Path, hub_options: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(source)
    local = isinstance(source, Path) or path.is_absolute() or source.startswith(".")
    if (
        local and not path.is_dir()
    ):  # Not left to the hub client, which would ask the network for a repository "/models/x".
        raise CheckpointError(
            f"{source}: no such directory; give a directory with a preprocessor_config.json, or a hub id"
        )
    try:
        config = get_image_processor_config(str(source), **hub_options)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{source}: no image processor: {err}") from err
    if not config:
        raise CheckpointError(f"{source}: no image processor: it has no preprocessor_config.json")
    return dict(config)


def _build(config: dict[str, Any], error: type[CheckpointError | ConfigError], where: str) -> Any:
    name = config["image_processor_type"]
    if not isinstance(name, str) or not re.fullmatch(r"\w+ImageProcessor(Fast|Pil)?", name):
        raise error(f"{where}: image_processor_type is {name!r}; it must name an image processor of transformers")
    processor_class = _class_of(name)
    if processor_class is None:
        raise error(f"{where}: transformers {transformers.__version__} has no image processor {name}")
    try:
        return processor_class.from_dict(config)
    except (TypeError, ValueError) as err:
        raise error(f"{where}: {name} refuses its configuration: {err}") from err


def _class_of(name: str) -> Any:
    """The class for what is installed; None if transformers has none of that name.

    Since transformers 5 a name stands for the torchvision variant, `<name>Pil` for the other one; `<name>Fast` is old.
    A class whose packages are missing is still there as a dummy that lists them.
    """
    base = re.sub(r"(Fast|Pil)$", "", name)
    dummy = None
    for candidate in (base, f"{base}Pil") if has_torchvision() else (f"{base}Pil", base):
        found = getattr(transformers, candidate, None)
        if found is not None and not getattr(found, "is_dummy", False):
            return found
        dummy = dummy or found
    if not has_torchvision() and "torchvision" in getattr(dummy, "_backends", ()):
        raise MissingDependencyError(f'{base} needs torchvision: pip install "onereplay[torchvision]"')
    return dummy


def needs_torchvision(config: Mapping[str, Any]) -> bool:
    """Whether the image processor that this configuration names exists for torchvision only, installed or not."""
    base = re.sub(r"(Fast|Pil)$", "", str(config.get("image_processor_type", "")))
    return bool(base) and getattr(transformers, f"{base}Pil", None) is None


def has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None
