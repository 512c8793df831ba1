"""The count of operations, against PyTorch's own counter on the stock modules; and the limit by hand."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onereplay.adapters import adapter_for
from onereplay.adapters.base import Adapter
from onereplay.bench.inputs import processor_outputs, sized
from onereplay.bench.roofline import Roofline, encoder_flops, measure_roofline, weight_bytes
from onereplay.encoder import load_model

TINY = ("qwen2_5_vl-7b@tiny", "internvl3-1b@tiny", "lfm2_vl-1.6b@tiny")
CPU = torch.device("cpu")


def tiny_adapter(name: str) -> Adapter[Any]:
    return adapter_for(load_model(f"preset:{name}", "cpu"))


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_that_torch_counts_on_the_stock_model(name: str) -> None:
    """256 tokens: one image, or tiles of one size, so that the stock model pads nothing."""
    adapter = tiny_adapter(name)
    inputs = processor_outputs(adapter, sized(adapter, 256), torch.float32)
    found = encoder_flops(adapter, inputs)
    for part in adapter.parts:  # products and sums that the counter sees, instead of a fused attention that it may not
        if hasattr(module := getattr(adapter.model, part), "config"):
            module.config._attn_implementation = "eager"
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        adapter.stock_features(adapter.model, inputs)
    assert found == pytest.approx(counter.get_total_flops(), rel=0.05 if name.startswith("lfm2") else 0)
    # transformers 5.17 resizes the position table of SigLIP 2 (LFM2-VL) without the product that 5.24 and we take.


def test_attention_counts_the_rows_of_each_sequence_and_no_padding() -> None:
    """Two images of 64 tokens have half the attention of one of 128 (4 layers, 2 of them in windows)."""
    adapter = tiny_adapter("qwen2_5_vl-7b@tiny")
    one, two = (
        encoder_flops(adapter, adapter.example_inputs(grids, torch.Generator()))
        for name, grids in adapter.layouts("vision", 128, 2)
        if name in ("the fewest images", "two images")
    )
    assert one > two


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
