"""Towers that transformers lacks, one a file, with the names that published checkpoints give their weights.

A file here defines a configuration and a base model (`PreTrainedConfig`, `PreTrainedModel`) whose `get_image_features`
is plain: items one by one, dense attention. It announces itself to transformers when it is imported:

    AutoConfig.register(model_type, Config)
    AutoModel.register(Config, Model)
    register_checkpoint_conversion_mapping(model_type, [WeightRenaming(published, ours), ...])

so presets, loading and `from_pretrained` treat it like any other model.
"""

import functools
import importlib

MODULES: tuple[str, ...] = ("deepseek_vl_v2", "deepseek_v41", "deepseek_ocr", "step3", "step_robotics")
"""Files of this package that announce a model."""


@functools.cache
def register() -> None:
    """Make all of them known to transformers; again does nothing."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
