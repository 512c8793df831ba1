"""Every way of a benchmark encodes the same batch, for models of every engine and every kind of stock entry point."""

import pytest
import torch

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_for
from onereplay.bench.inputs import Shape, num_tokens, picture, sized
from onereplay.bench.ways import Prepared, Ways
from onereplay.core.items import Modality
from onereplay.encoder import load_model
from tests.adapters.conftest import tiny_preset

MODELS = (
    "clip",
    "deepseek_ocr",
    "deepseek_v41",
    "deepseek_vl_v2",
    "gemma4",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llama4",
    "qwen3_vl",
    "siglip2",
    "step3p7",
    "whisper",
)


@pytest.mark.parametrize("model_type", MODELS)
def test_plain_transformers_and_ours_encode_the_same_batch(model_type: str) -> None:
    """fp32 on the CPU: 1e-5 of the largest value, as `onereplay.checking` says."""
    adapter = adapter_for(load_model(f"preset:{tiny_preset(model_type)}", "cpu"))
    ways = Ways(adapter, EncoderCudaGraphConfig())
    shapes = [sized(adapter, 16)]
    if Modality.IMAGE in adapter.modalities:
        side = 56
        shapes.append(Shape("pictures", (picture(adapter, side, 2 * side), picture(adapter, side, side))))
    for shape in shapes:
        batch = Prepared.of(adapter, shape)
        ours, plain = (
            torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in ways.call(way, batch)()])
            for way in ("eager", "plain")
        )
        assert ours.shape == plain.shape
        assert (ours - plain).abs().max() <= 1e-5 * plain.abs().max().clamp(min=1)
        assert num_tokens(adapter, shape) == sum(item.num_tokens for item in adapter.batch(**batch.on_cpu).items)
    ways.close()
