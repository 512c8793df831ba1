"""LFM2-VL photos through the processor of transformers, which needs torchvision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from onereplay.encoder import Encoder
from tests.gpu.conftest import FULL, TINY, assert_as_right_as_plain, made

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
NAMES = ("astronaut.jpg", "chelsea.png", "rocket.jpg")


@pytest.fixture(autouse=True)
def _torchvision() -> None:
    pytest.importorskip("torchvision", reason="the image processor of LFM2-VL needs torchvision")


def processed(encoder: Encoder, name: str) -> dict[str, Any]:
    """What the processor of transformers makes of one photo, without onereplay."""
    image = Image.open(PHOTOS / name).convert("RGB")
    return dict(encoder.preprocessor.processor(images=[image], return_tensors="pt"))


@pytest.mark.parametrize("preset", [TINY["lfm2_vl"], FULL["lfm2_vl"]])
def test_photos_give_what_plain_transformers_gives_on_the_processors_output(preset: str) -> None:
    """The tiny processor cuts a photo into tiles; the published one keeps each of these whole or cuts it in few."""
    with made("lfm2_vl", 256, 1024, preset=preset) as encoder:
        alone: dict[str, Tensor] = {}
        for name in NAMES:
            (alone[name],) = encoder.encode([PHOTOS / name])
            assert_as_right_as_plain(encoder, [alone[name]], processed(encoder, name))
        together = encoder.encode([PHOTOS / name for name in NAMES])
        assert [rows.shape for rows in together] == [alone[name].shape for name in NAMES]
        report = encoder.report()
        assert report.batches == 4
        assert sum(report.replays["vision"].values()) + sum(report.eager["vision"].values()) == 4
        for rows, name in zip(together, NAMES, strict=True):
            assert_as_right_as_plain(encoder, [rows], processed(encoder, name))


def test_encode_each_gives_every_photo_once_and_in_order() -> None:
    with made("lfm2_vl", 64, 256, preset=TINY["lfm2_vl"]) as encoder:
        sources = [PHOTOS / name for name in NAMES] * 2
        found = list(encoder.encode_each(sources))
        assert [entry.index for entry in found] == list(range(6))
        for entry, name in zip(found, NAMES * 2, strict=True):
            assert entry.features is not None
            assert_as_right_as_plain(encoder, [entry.features], processed(encoder, name))
        torch.cuda.synchronize()
