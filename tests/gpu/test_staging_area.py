"""Pixels written into the static buffer on the device: no copy, and no batch before them is disturbed."""

import torch
from torch import Tensor

from onereplay.encoder import Encoder
from tests.gpu.conftest import assert_same, inputs_of, keep_busy
from tests.gpu.test_transfers import metadata_copies, transfers


def written(encoder: Encoder, tokens: int, seed: int = 0) -> tuple[str, dict[str, object], Tensor]:
    """The name of the pixels, the other inputs, and the pixels on the device in the model's dtype."""
    inputs = inputs_of(encoder, tokens, seed)
    (name,) = (name for name in inputs if name.startswith("pixel_values"))
    return name, inputs, inputs.pop(name).to("cuda", encoder.dtype)


def rows_of(encoder: Encoder, tokens: int) -> int:
    """Rows of the staged buffer that so many tokens take."""
    (demand,) = encoder.manager.plan(encoder.adapter.batch(**inputs_of(encoder, tokens))).demands.values()
    return demand.patches if encoder.adapter.engine == "packed" else demand.sequences


def as_area(encoder: Encoder, pixels: Tensor, tokens: int) -> bool:
    """Whether the model's pixels are rows of the buffer as they come (LFM2-VL pads each tile)."""
    return len(pixels) == rows_of(encoder, tokens)


def test_pixels_in_the_staging_area_cost_metadata_alone(encoder: Encoder) -> None:
    name, others, pixels = written(encoder, 64)
    if not as_area(encoder, pixels, 64):
        return
    expected = encoder.encode_inputs(**others, **{name: pixels})
    encoder.encode_inputs(**inputs_of(encoder, 64, seed=1))
    torch.cuda.synchronize()
    with encoder.manager.staging_area(len(pixels)) as area:
        area.copy_(pixels)
        with transfers() as found:
            rows = encoder.encode_inputs(**others, **{name: area})
    assert found.to_device == metadata_copies(encoder)
    assert not found.to_host
    assert_same(rows, expected)


def test_what_is_written_waits_for_the_batch_before_and_the_batch_behind_waits_for_it(encoder: Encoder) -> None:
    """Each in a stream of its own, the first and the area's kept busy."""
    name, others, pixels = written(encoder, 64)
    if not as_area(encoder, pixels, 64):
        return
    before, behind = inputs_of(encoder, 64, seed=1), inputs_of(encoder, 64, seed=2)
    expected = [encoder.encode_inputs(**each) for each in (before, {**others, name: pixels}, behind)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        keep_busy()
        found = [encoder.encode_inputs(**before)]
    with torch.cuda.stream(streams[1]), encoder.manager.staging_area(len(pixels)) as area:
        keep_busy()
        area.copy_(pixels)
        found.append(encoder.encode_inputs(**others, **{name: area}))
    with torch.cuda.stream(streams[2]):
        found.append(encoder.encode_inputs(**behind))
    torch.cuda.synchronize()
    for rows, right in zip(found, expected, strict=True):
        assert_same(rows, right)
