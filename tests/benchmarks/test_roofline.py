"""The count of operations, against PyTorch's own counter on the stock modules; and the limit by hand."""

from typing import Any

import pytest
import torch
from benchmarks.inputs import MIXES, Shape, for_stock_method, num_tokens, processor_outputs, shapes
from benchmarks.roofline import Roofline, encoder_flops, measure_roofline, weight_bytes
from torch.utils.flop_counter import FlopCounterMode

from onereplay.adapters import adapter_class, adapter_for
from onereplay.adapters.base import Adapter
from onereplay.loading import random_weights_, vision_model
from onereplay.presets import get_preset, hf_config

TINY = ("qwen2_5_vl-7b@tiny", "internvl3-1b@tiny", "lfm2_vl-1.6b@tiny")
CPU = torch.device("cpu")


def tiny_adapter(name: str) -> Adapter[Any]:
    preset = get_preset(name)
    parts = adapter_class(preset.model_type).parts
    model = vision_model(hf_config(preset), device="cpu", dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    for part in parts:  # products and sums that the counter sees, instead of a fused attention that it may not
        if hasattr(module := getattr(model, part), "config"):
            module.config._attn_implementation = "eager"
    return adapter_for(model)


def batch_of_equal_tiles(adapter: Adapter[Any], name: str) -> Shape:
    """The stock LFM2-VL computes padding rows too, and the counter counts them: tiles of one size have none."""
    mixed = [*shapes(adapter, get_preset(name), [64, 300])]
    return mixed[0] if adapter.model_type == "lfm2_vl" else mixed[-1]


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_that_torch_counts(name: str) -> None:
    adapter = tiny_adapter(name)
    shape = batch_of_equal_tiles(adapter, name)
    inputs = for_stock_method(processor_outputs(adapter, shape, torch.float32), CPU, torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        adapter.model.get_image_features(**inputs)
    # transformers 5.24 resizes the position table of SigLIP 2 by a product, 5.17 does not; the count leaves it out.
    positions = counter.get_flop_counts().get("Siglip2VisionModel.embeddings", {}).get(torch.ops.aten.mm, 0)
    assert encoder_flops(adapter, shape.grids) == counter.get_total_flops() - positions


@pytest.mark.parametrize(
    ("name", "mix8"), [("qwen2_5_vl-7b", 2611), ("internvl3-8b", 14 * 256), ("lfm2_vl-1.6b", 1384)]
)
def test_mix8_has_the_tokens_that_the_processors_give(name: str, mix8: int) -> None:
    preset = get_preset(name)
    adapter = adapter_class(preset.model_type)(hf_config(preset))
    found = {shape.name: num_tokens(adapter, shape) for shape in shapes(adapter, preset, [64, 1024, 8192])}
    assert found["mix8"] == mix8
    assert set(MIXES) <= set(found)


def test_sized_batches_have_the_tokens_that_were_asked_for_and_tiles_at_least_one() -> None:
    for name, expected in (
        ("qwen2_5_vl-7b", [64, 128, 5120]),
        ("internvl3-8b", [256, 5120]),
        ("lfm2_vl-1.6b", [64, 128, 5120]),
    ):
        preset = get_preset(name)
        adapter = adapter_class(preset.model_type)(hf_config(preset))
        sized = [shape for shape in shapes(adapter, preset, [64, 128, 5120]) if shape.name not in MIXES]
        assert [num_tokens(adapter, shape) for shape in sized] == expected


def test_published_qwen_tower_needs_the_operations_of_its_sizes() -> None:
    # By hand, 64 tokens = 256 patches in 4 windows: 2 * 256 * (1,176*1,280 + 32*(4*1,280^2 + 3*1,280*3,420))
    # + attention 4*1,280*(4*256^2 + 28*4*64^2) + 2 * 64 * (5,120^2 + 5,120*3,584).
    preset = get_preset("qwen2_5_vl-7b")
    adapter = adapter_class(preset.model_type)(hf_config(preset))
    (shape,) = (shape for shape in shapes(adapter, preset, [64]) if shape.name == "64")
    layers = 2 * 256 * (1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420))
    rest = 4 * 1280 * (4 * 256**2 + 28 * 4 * 64**2) + 2 * 64 * (5120**2 + 5120 * 3584)
    assert encoder_flops(adapter, shape.grids) == layers + rest


def test_the_limit_is_the_slower_of_products_and_weights() -> None:
    roofline = Roofline(8192, "bfloat16", flops_per_second=100e12, copied_bytes=1, bytes_per_second=1e12)
    assert roofline.limit_ms(10**12, 1) == pytest.approx(10)
    assert roofline.limit_ms(1, 10**9) == pytest.approx(1)


def test_rates_are_positive_on_a_cpu_and_print_themselves() -> None:
    roofline = measure_roofline(CPU, torch.float32)
    assert roofline.flops_per_second > 0
    assert roofline.bytes_per_second > 0
    assert "512^3 product, float32" in str(roofline)


def test_weight_bytes_are_those_of_the_parts() -> None:
    adapter = tiny_adapter("internvl3-1b@tiny")
    assert weight_bytes(adapter) == sum(parameter.nbytes for parameter in adapter.model.parameters())
