"""What checks and benchmarks encode is what a processor could make."""

import pytest

from onereplay.adapters import adapter_class
from onereplay.adapters.packed import PackedAdapter
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset

BOUNDED = ("gemma4", "lfm2_vl", "llava", "minicpmv4_6", "mistral3")
"""Packed models whose processors bound a sequence."""


@pytest.mark.parametrize("model_type", BOUNDED)
def test_layouts_have_the_tokens_asked_for_in_sequences_within_the_bound(model_type: str) -> None:
    preset = get_preset(tiny_preset(model_type).removesuffix("@tiny"))
    adapter = adapter_class(model_type)(hf_config(preset))
    assert isinstance(adapter, PackedAdapter)
    bound = adapter.max_sequence_patches
    assert bound is not None
    for tokens in (2, 3, 64, 257, 767, 1025, 1121, 3359, 4097, 5120, 5121, 8191, 12289):
        layouts = adapter.layouts("vision", tokens, 64)
        for name, grids in layouts:
            assert sum(adapter.size(grid).tokens for grid in grids) == tokens, name
            assert max(grid.h * grid.w for grid in grids) <= bound, (tokens, name)
