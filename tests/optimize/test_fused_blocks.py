"""Fused blocks: the same features up to rounding for every model whose blocks are recognised, weights given back.

Tolerance: float32, sums in another order; see `onereplay.checking`.
"""

import gc
from typing import Any

import pytest
import torch

from onereplay.adapters import ADAPTERS, adapter_class
from onereplay.adapters.base import share_weights
from onereplay.errors import ConfigError
from onereplay.geometry import Grid
from onereplay.optimize import Rewritten, choose
from onereplay.optimize import storage as storage_module
from onereplay.optimize.storage import Storage
from tests.optimize.test_rewrites import CUDA, close, encoded, model_of

FUSED = {
    "clip": 2,
    "clip_vision_model": 2,
    "deepseek_ocr": 2,
    "deepseek_v41": 2,
    "deepseek_vl": 2,
    "deepseek_vl_hybrid": 2,
    "deepseek_vl_v2": 2,
    "dinov2": 2,
    "ernie4_5_vl_moe": 3,
    "gemma3": 2,
    "glm46v": 2,
    "glm4v": 2,
    "glm4v_moe": 2,
    "idefics3": 2,
    "internvl": 2,
    "lfm2_vl": 2,
    "llava": 3,
    "minicpmv4_6": 4,
    "minimax_m3_vl": 2,
    "mistral3": 3,
    "paddleocr_vl": 2,
    "qwen2_5_vl": 4,
    "qwen2_vl": 2,
    "qwen3_5": 4,
    "qwen3_5_moe": 4,
    "qwen3_vl": 4,
    "qwen3_vl_moe": 4,
    "siglip": 2,
    "siglip2": 2,
    "siglip2_vision_model": 2,
    "siglip_vision_model": 2,
    "smolvlm": 2,
}
"""Blocks of the tiny towers that are recognised; of all other models none is: they norm queries and keys, or what a
branch gives, or rotate in pairs."""


def blocks_of(model: Any) -> list[Any]:
    return list(adapter_class(model.config.model_type)(model.config, model).blocks())


@pytest.mark.parametrize("model_type", sorted(ADAPTERS))
def test_the_blocks_of_a_model_are_recognised_or_left_alone(model_type: str) -> None:
    model = model_of(model_type)
    blocks = blocks_of(model)
    found = Rewritten([model], ["fused_blocks"], blocks)
    assert len(found.forwards.keys() & set(blocks)) == FUSED.get(model_type, 0)
    found.restore()


def test_a_norm_that_stands_alone_is_one_kernel() -> None:
    model = model_of("qwen2_5_vl")
    assert model.visual.merger.ln_q in Rewritten([model], ["fused_blocks"], blocks_of(model)).forwards


@pytest.mark.parametrize("model_type", sorted(FUSED))
def test_fused_blocks_change_nothing_but_rounding(model_type: str) -> None:
    """Also of models that take a residual stream from between two blocks (deepstack)."""
    model = model_of(model_type)
    adapter = adapter_class(model_type)(model.config, model)
    _, grids = adapter.layouts(next(iter(adapter.paths())), 512, 8)[0]
    found, expected = encoded(model, ("fused_blocks",), list(grids))
    assert close(found, expected)


@pytest.mark.parametrize("model_type", ["siglip", "clip", "internvl", "gemma3", "idefics3"])
def test_one_tile_alone_is_as_right_as_many(model_type: str) -> None:
    """Its hidden states may be a transposed view, which several tiles are not."""
    model = model_of(model_type)
    found, expected = encoded(model, ("fused_blocks",), [Grid(1, 1, 1)])
    assert close(found, expected)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_layer_scale_scales_a_branch_with_its_bias(scale: float) -> None:
    model = model_of("internvl")
    for name, parameter in model.named_parameters():
        if "lambda" in name:
            torch.nn.init.normal_(parameter, std=scale)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    found, expected = encoded(model, ("fused_blocks",), [Grid(1, 1, 1)] * 3)
    assert close(found, expected)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "lfm2_vl", "glm4v", "internvl"])
def test_biases_count(model_type: str) -> None:
    """They are added where they cost nothing: in the norm before, in the activation behind."""
    model = model_of(model_type)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    adapter = adapter_class(model_type)(model.config, model)
    _, grids = adapter.layouts("vision", 64, 8)[0]
    found, expected = encoded(model, ("fused_blocks",), list(grids))
    assert close(found, expected)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "lfm2_vl"])
def test_a_change_of_the_weights_in_place_reaches_a_fused_block(model_type: str) -> None:
    model = model_of(model_type)
    adapter = adapter_class(model_type)(model.config, model, "auto", ("fused_blocks",))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    _, grids = adapter.layouts("vision", 64, 8)[0]
    inputs = adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    from onereplay.checking import plain_features
    from onereplay.core.manager import EncoderCudaGraphManager

    found = torch.cat(EncoderCudaGraphManager(adapter).encode(adapter.batch(**inputs)))
    assert close(found, plain_features(adapter, model, inputs))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "lfm2_vl"])
def test_restore_gives_the_weights_back_bit_for_bit_and_dense(model_type: str) -> None:
    model = model_of(model_type)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rewritten = Rewritten([share_weights(model)], ["fused_blocks"], blocks_of(model))
    assert {name: value for name, value in model.state_dict().items() if not torch.equal(value, before[name])} == {}
    rewritten.restore()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in after.values())


def test_an_argument_that_a_fused_block_would_not_obey_is_refused() -> None:
    model = model_of("lfm2_vl")
    (block, *_), rows = blocks_of(model), torch.randn(1, 4, 64)
    rewritten = Rewritten([model], ["fused_blocks"], [block])
    with pytest.raises(TypeError, match="takes no head_mask; leave fused_blocks out of optimize"):
        block(rows, None, head_mask=torch.ones(1))
    rewritten.restore()


def test_a_block_with_a_bias_on_some_of_its_projections_is_left_alone() -> None:
    """As one layer they would all have one, or none."""
    model = model_of("lfm2_vl")
    block = blocks_of(model)[0]
    block.self_attn.k_proj.bias = None
    assert block not in Rewritten([model], ["fused_blocks"], blocks_of(model)).forwards


def test_joined_weights_hold_no_second_copy() -> None:
    query, key = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    values = [query.detach().clone(), key.detach().clone()]
    storage = Storage()
    joined = storage.stack([query, key], rows=6)
    assert joined.shape == (12, 3)
    assert query.data_ptr() == joined.data_ptr()
    assert torch.equal(joined[:4], values[0])
    assert torch.equal(joined[6:10], values[1])
    assert not joined[4:6].any()
    assert not joined[10:].any()


def test_two_users_share_what_they_join_alike_and_the_last_gives_it_back() -> None:
    query, key = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    first, second = Storage(), Storage()
    joined = first.stack([query, key])
    assert second.stack([query, key]) is joined
    first.release()
    assert query.data_ptr() == joined.data_ptr()
    second.release()
    assert query.data_ptr() != joined.data_ptr()
    assert torch.equal(query, joined[:4])


def test_weights_that_moved_since_are_joined_anew() -> None:
    query, key = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    first, second = Storage(), Storage()
    joined = first.stack([query, key])
    key.data = torch.zeros(4, 3)
    again = second.stack([query, key])
    assert again is not joined
    assert not again[4:].any()


def test_fused_blocks_are_refused_in_a_trace_on_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match="fused_blocks' runs kernels that no trace can hold"):
        choose(("fused_blocks",), CUDA, "traced")


class Doubled(torch.nn.Linear):
    """A layer of somebody else's."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.mark.parametrize("name", ["attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.down_proj"])
@pytest.mark.parametrize("how", ["subclass", "forward", "parametrization"])
def test_what_somebody_put_into_a_block_counts(name: str, how: str) -> None:
    """A rewrite that reads the weights alone would pass over it."""
    model = model_of("qwen2_5_vl", intermediate_size=100)
    layer = model.visual.blocks[0].get_submodule(name)
    if how == "subclass":
        layer.__class__ = Doubled
    elif how == "forward":
        layer.forward = lambda rows: 2 * torch.nn.functional.linear(rows, layer.weight, layer.bias)
    else:
        torch.nn.utils.parametrizations.weight_norm(layer)
        layer.parametrizations.weight.original0.data.mul_(2)
    found, expected = encoded(model, ("aligned_mlp", "fused_blocks"), [Grid(1, 8, 12)])
    assert close(found, expected)


def test_an_encoder_that_is_refused_leaves_the_weights_of_the_other_where_they_are() -> None:
    query, key = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    first, second = Storage(), Storage()
    first.stack([query, key])
    joined = second.stack([query, key], rows=6)
    first.release()
    assert query.data_ptr() == joined.data_ptr()


def test_rewrites_that_nobody_restored_give_the_weights_back_when_they_are_collected() -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    rewritten = Rewritten([share_weights(model)], ["fused_blocks"], blocks_of(model))
    down = model.visual.blocks[0].mlp.down_proj.weight
    assert not down.is_contiguous()
    del rewritten
    gc.collect()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in model.state_dict().values())


def test_a_release_in_the_middle_of_another_join_waits_for_the_next() -> None:
    """As of a finalizer that the garbage collector runs there."""
    query, key = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    first, second = Storage(), Storage()
    joined = first.stack([query, key])
    with storage_module._lock:
        first.release_if_free()
    assert query.data_ptr() == joined.data_ptr()
    second.pad(torch.nn.Parameter(torch.randn(2)), (4,))
    assert query.data_ptr() != joined.data_ptr()
