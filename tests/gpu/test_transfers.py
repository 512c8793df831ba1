"""What crosses between host and device for one batch: one copy of metadata, one of pixels, and nothing back."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onereplay.encoder import Encoder
from tests.gpu.conftest import assert_same, inputs_of

READERS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
"""Operations that wait for the device to tell the host something."""


@dataclass
class Transfers:
    """What a block copied."""

    to_device: list[torch.dtype] = field(default_factory=list)
    to_host: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    def __init__(self, found: Transfers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in READERS and args[0].is_cuda:
            self.found.reads.append(name)
        if name in ("copy_", "_to_copy"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            self._note(source, target)
        return result

    def _note(self, source: Tensor, target: Tensor) -> None:
        if not target.numel() or source.device.type == target.device.type:
            return
        if target.is_cuda:
            self.found.to_device.append(target.dtype)
        else:
            self.found.to_host.append(str(tuple(target.shape)))


@contextmanager
def transfers() -> Iterator[Transfers]:
    """Record the copies of the block; whatever makes the host wait for the device in it is an error."""
    found = Transfers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Recorder(found):
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")


def metadata_copies(encoder: Encoder) -> list[torch.dtype]:
    """One block of bytes for a packed model; tiles carry no metadata."""
    return [torch.uint8] if encoder.adapter.engine == "packed" else []


@pytest.mark.parametrize("layout", [0, -1], ids=["fewest items", "most items"])
@pytest.mark.parametrize("tokens", [64, 256, 260], ids=["replay 64", "replay 256", "eager"])
def test_pixels_of_the_host_cross_once_metadata_once_and_nothing_comes_back(
    encoder: Encoder, tokens: int, layout: int
) -> None:
    inputs = inputs_of(encoder, tokens, layout=layout)
    expected = encoder.encode_inputs(**inputs)
    kinds = sum(name.startswith("pixel_values") for name in inputs)
    torch.cuda.synchronize()
    with transfers() as found:
        rows = encoder.encode_inputs(**inputs)
    assert sorted(found.to_device, key=str) == sorted([*metadata_copies(encoder), encoder.dtype], key=str)
    assert not found.to_host
    assert not found.reads
    assert kinds in (1, 2)
    assert_same(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [64, 260], ids=["replay", "eager"])
def test_pixels_that_lie_on_the_device_do_not_cross(encoder: Encoder, tokens: int, dtype: torch.dtype) -> None:
    inputs = inputs_of(encoder, tokens, layout=-1)
    expected = encoder.encode_inputs(**inputs)
    there = {
        name: value.to("cuda", dtype) if name.startswith("pixel_values") else value for name, value in inputs.items()
    }
    torch.cuda.synchronize()
    with transfers() as found:
        rows = encoder.encode_inputs(**there)
    assert found.to_device == metadata_copies(encoder)
    assert not found.to_host
    assert not found.reads
    assert_same(rows, expected)


def test_images_and_a_video_in_one_batch_cross_together(encoder: Encoder) -> None:
    if encoder.adapter.model_type != "qwen2_5_vl":
        pytest.skip("takes images and videos under one name, or images alone")
    images, video = inputs_of(encoder, 64, layout=1), inputs_of(encoder, 64, layout=-1)
    inputs = {**images, **{name: value for name, value in video.items() if "video" in name}}
    assert {"pixel_values", "pixel_values_videos"} <= inputs.keys()
    encoder.encode_inputs(**inputs)
    torch.cuda.synchronize()
    with transfers() as found:
        encoder.encode_inputs(**inputs)
    assert sorted(found.to_device, key=str) == sorted([torch.uint8, torch.bfloat16], key=str)


def test_the_recorder_sees_a_copy_back_and_a_read() -> None:
    found = Transfers()
    there = torch.ones(3, device="cuda")
    with _Recorder(found):
        there.cpu()
        there.sum().item()
        torch.ones(2).to("cuda")
    assert (found.to_host, found.reads, found.to_device) == (["(3,)"], ["_local_scalar_dense"], [torch.float32])
