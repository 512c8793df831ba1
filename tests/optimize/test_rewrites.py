"""Each rewrite: the same result up to rounding, the stock model untouched, everything given back.

Tolerance: float32, sums in another order; see `onereplay.checking`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_class
from onereplay.adapters.base import share_weights
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.config import REWRITES
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.errors import ConfigError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.optimize import Rewritten, choose
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def model_of(model_type: str, **vision: Any) -> Any:
    config = hf_config(get_preset(tiny_preset(model_type)))
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    parts = adapter_class(model_type).parts
    model = vision_model(config, device=CPU, dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    return model


def encoded(model: Any, names: tuple[str, ...], grids: list[Grid]) -> tuple[Tensor, Tensor]:
    """Rows of an eager forward with the rewrites, and of plain transformers."""
    adapter = adapter_class(model.config.model_type)(model.config, model, "auto", names)
    inputs = adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    found = torch.cat(EncoderCudaGraphManager(adapter).encode(adapter.batch(**inputs)))
    return found, plain_features(adapter, model, inputs)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


@pytest.mark.parametrize("name", ["patch_embedding", "aligned_mlp"])
def test_a_rewrite_changes_nothing_but_rounding(name: str) -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    found, expected = encoded(model, (name,), [Grid(1, 8, 12), Grid(3, 4, 4)])
    assert close(found, expected)


@pytest.mark.parametrize(("name", "count"), [("patch_embedding", 1), ("aligned_mlp", 4)])
def test_a_rewrite_finds_its_modules(name: str, count: int) -> None:
    """A rewrite that matches nothing would pass every other test."""
    model = model_of("qwen2_5_vl", intermediate_size=100)
    assert len(Rewritten([model.visual], [name]).forwards) == count


def test_an_aligned_width_is_left_alone() -> None:
    assert not Rewritten([model_of("qwen2_5_vl", intermediate_size=128)], ["aligned_mlp"]).forwards


@pytest.mark.parametrize("bias", [True, False])
def test_padded_weights_are_views_so_that_a_change_in_place_reaches_both(bias: bool) -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    if not bias:
        for block in model.visual.blocks:
            block.mlp.up_proj.bias = block.mlp.down_proj.bias = None
    before = copy.deepcopy(model.visual.state_dict())
    rewritten = Rewritten([model.visual], ["aligned_mlp"])
    assert all(torch.equal(value, before[key]) for key, value in model.visual.state_dict().items())
    with torch.no_grad():
        for parameter in model.visual.parameters():
            parameter.mul_(1.5)
    mlp, rows = model.visual.blocks[0].mlp, torch.randn(3, model.visual.config.hidden_size)
    found = mlp(rows)
    rewritten.restore()
    assert close(found, mlp(rows))


def test_restore_gives_dense_weights_of_their_own_bit_for_bit() -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    before = {name: (value.clone(), value.stride()) for name, value in model.visual.named_parameters()}
    rewritten = Rewritten([model.visual], ["patch_embedding", "aligned_mlp"])
    assert not model.visual.blocks[0].mlp.down_proj.weight.is_contiguous()
    rewritten.restore()
    for name, value in model.visual.named_parameters():
        assert torch.equal(value, before[name][0])
        assert value.stride() == before[name][1]
        assert value.untyped_storage().nbytes() == value.nbytes
    assert not any("_onereplay" in key for module in model.modules() for key in vars(module))


def test_the_stock_model_runs_stock_code_while_an_encoder_has_rewrites() -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced", optimize=("patch_embedding",))
    with Encoder(model, config) as encoder:
        assert not any("forward" in vars(module) for module in model.modules())
        _, grids = encoder.adapter.layouts("vision", 64, 4)[1]
        inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
        found = torch.cat(encoder.encode_inputs(**inputs))
        assert close(found, plain_features(encoder.adapter, model, inputs))


def test_accelerate_with_rewrites_is_undone_by_restore() -> None:
    model = model_of("qwen2_5_vl", intermediate_size=100)
    before = copy.deepcopy(model.visual.state_dict())
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced", optimize=("aligned_mlp",))
    accelerate(model, config).restore()
    after = model.visual.state_dict()
    assert all(torch.equal(after[key], value) and after[key].is_contiguous() for key, value in before.items())


def test_forward_hooks_are_off_inside_and_back_outside() -> None:
    model, seen = model_of("internvl"), []
    model.vision_tower.encoder.layer[0].register_forward_hook(lambda *call: seen.append(1))
    tile = [Grid(1, 1, 1)]
    encoded(model, (), tile)
    assert len(seen) == 1  # the plain call's, not the encoder's


@pytest.mark.parametrize(
    ("model_type", "vision", "batches"),
    [
        (
            "qwen2_5_vl",
            {"depth": 12, "fullatt_block_indexes": [3, 7, 11], "intermediate_size": 100},
            [[Grid(1, 8, 8)], [Grid(1, 16, 16)] * 2, [Grid(1, 4, 4)] * 5, [Grid(1, 20, 20)], [Grid(2, 6, 4)]],
        ),
        ("internvl", {"num_hidden_layers": 12}, [[Grid(1, 1, 1)] * tiles for tiles in (1, 2, 3, 5, 8)]),
        *(
            (
                model_type,
                {"num_hidden_layers": 12},
                [[Grid(1, 4 * m, 4 * m)], [Grid(1, 5 * m, 6 * m)] * 2, [Grid(1, m, 2 * m)] * 5, [Grid(1, m, 49 * m)]],
            )
            for model_type, m in (("gemma4", 3), ("llava", 1), ("mistral3", 2), ("minicpmv4_6", 4))
        ),
        *(
            (model_type, {"num_hidden_layers": 12}, [[Grid(1, 4, 6)], [Grid(1, 8, 8)] * 2, [Grid(3, 2, 6)] * 3])
            for model_type in ("glm4v", "glm4v_moe", "glm_ocr", "minimax_m3_vl")
        ),
    ],
)
def test_blocks_compile_whole_and_once_for_all_layers_and_sizes(
    model_type: str, vision: dict[str, Any], batches: list[list[Grid]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch stops compiling a function after 8 variants: one a layer or a size would leave most blocks eager. Blocks
    that `fused_blocks` knows are compiled where that is left out."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile_(fn, backend="eager", **options))
    torch._dynamo.reset()
    counters.clear()
    model = model_of(model_type, **vision)
    for grids in batches:
        found, expected = encoded(model, ("patch_embedding", "aligned_mlp", "compiled_blocks"), grids)
        assert close(found, expected)
    variants = counters["stats"]["unique_graphs"]
    assert 1 <= variants <= 6
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_all_rewrites_are_the_default_under_cuda_graphs_and_none_elsewhere() -> None:
    assert choose(None, CUDA, "auto") == choose(None, CUDA, "cuda") == REWRITES
    assert choose(None, CUDA, "traced") == choose(None, CPU, "auto") == ()
    assert choose((), CUDA, "auto") == ()
    assert choose(("aligned_mlp",), CPU, "auto") == ("aligned_mlp",)


@pytest.mark.parametrize(("device", "backend"), [(CPU, "auto"), (CUDA, "traced")])
def test_compiled_blocks_without_cuda_graphs_are_refused(device: torch.device, backend: str) -> None:
    with pytest.raises(ConfigError, match="compiled_blocks' needs backend='cuda'"):
        choose(("compiled_blocks",), device, backend)


def test_modules_of_other_kinds_are_left_alone() -> None:
    other = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 3))
    assert not Rewritten([other], ["patch_embedding", "aligned_mlp"]).forwards


def test_a_module_that_does_more_than_a_gated_mlp_is_left_alone() -> None:
    """GLM's merger has the parts of one behind a projection and a norm."""
    model = model_of("glm_ocr")
    assert model.visual.merger.gate_proj.out_features % 64
    assert model.visual.merger not in Rewritten([model.visual], ["aligned_mlp"]).forwards


def test_encoders_of_one_model_share_padded_weights_until_the_last_gives_them_back() -> None:
    """A second padding would leave the first encoder's graph with weights of its own; a first restore would free the
    second's."""
    model = model_of("qwen2_5_vl", intermediate_size=100)
    mlp = model.visual.blocks[0].mlp
    dense = mlp.down_proj.weight.data_ptr()
    first, second = (Rewritten([share_weights(model.visual)], ["aligned_mlp"]) for _ in range(2))
    padded = mlp.down_proj.weight.data_ptr()
    biases = [parameter.data_ptr() for parameter in model.visual.parameters() if parameter.ndim == 1]
    first.restore()
    assert mlp.down_proj.weight.data_ptr() == padded != dense
    assert biases == [parameter.data_ptr() for parameter in model.visual.parameters() if parameter.ndim == 1]
    second.restore()
    assert mlp.down_proj.weight.is_contiguous()
