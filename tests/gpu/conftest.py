"""Tests of this folder run on a CUDA device, in bfloat16 where nothing else is said, and are skipped elsewhere.

They should take some minutes in all: small models without `torch.compile`, except where a test says that it
runs a published size as a user would.

Tolerance: the half-precision rule of `onereplay.checking`, an error against float32 of at most 1.1 times that of plain
transformers in the same dtype. Where the same graph runs on the same numbers, the bits are compared.
"""

import copy
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import ADAPTERS
from onereplay.checking import HALF_RATIO, plain_features
from onereplay.encoder import Encoder
from onereplay.geometry import Grid

TINY = {"qwen2_5_vl": "qwen2_5_vl-7b@tiny", "internvl": "internvl3-8b@tiny", "lfm2_vl": "lfm2_vl-450m@tiny"}
FULL = {name: preset.removesuffix("@tiny") for name, preset in TINY.items()}
BUDGETS = (64, 80, 128, 256)
NOT_COMPILED = ("patch_embedding", "aligned_mlp", "fused_blocks")
"""The rewrites that cost no compilation."""
MODELS = sorted(TINY)
"""One of each engine; `EVERY` is all that are registered."""
EVERY = sorted(ADAPTERS)
MIB = 2**20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder has the marker `gpu`; without a device it is skipped with that reason."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def made(model_type: str, *budgets: int, preset: str = "", **options: Any) -> Encoder:
    """An encoder under CUDA graphs; tiny unless a preset is named; `dtype` and `seed` go to the preset."""
    placed = {name: options.pop(name) for name in ("dtype", "seed") if name in options}
    config = EncoderCudaGraphConfig(
        **{"token_budgets": budgets or BUDGETS, "backend": "cuda", "optimize": NOT_COMPILED, **options}
    )
    return Encoder.from_preset(preset or TINY[model_type], device="cuda", config=config, **placed)


@pytest.fixture(scope="module", params=MODELS)
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    """A tiny encoder of each registered model, for tests that leave it as it is."""
    with made(request.param) as shared:
        yield shared


def inputs_of(encoder: Encoder, tokens: int, seed: int = 0, layout: int = 0) -> dict[str, Any]:
    """Random pixels of exactly this many tokens, on the CPU, by the processor's names."""
    _, grids = encoder.adapter.layouts("vision", tokens, 8)[layout]
    return dict(encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed)))


def inputs_of_grids(encoder: Encoder, grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    return dict(encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed)))


def exact_features(encoder: Encoder, inputs: dict[str, Any]) -> Tensor:
    """Plain transformers in float32, with full float32 products."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        return plain_features(encoder.adapter, copy.deepcopy(encoder.adapter.model).float(), inputs)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def relative_error(found: Tensor, reference: Tensor) -> float:
    """By norm, computed in float64."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def assert_as_right_as_plain(encoder: Encoder, found: Sequence[Tensor], inputs: dict[str, Any]) -> None:
    """The half-precision rule of `checking`."""
    rows, exact = torch.cat(list(found)), exact_features(encoder, inputs)
    assert rows.shape == exact.shape
    ours, theirs = (
        relative_error(each, exact) for each in (rows, plain_features(encoder.adapter, encoder.adapter.model, inputs))
    )
    assert ours <= HALF_RATIO * theirs, f"error {ours:.2e}, plain transformers {theirs:.2e}"


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit."""
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def collect() -> None:
    """Give everything that nobody holds back to the device."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def keep_busy(milliseconds: float = 50) -> None:
    """Occupy the current stream for about this long; what is enqueued behind it waits."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))
