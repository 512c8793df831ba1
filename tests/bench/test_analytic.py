"""A profile without a GPU: kernels of a tower on the meta device, and times from four numbers."""

import dataclasses

import pytest
import torch

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_for
from onereplay.bench.analytic import (
    Gpu,
    Kernel,
    Operation,
    Trace,
    analytic_profile,
    compared,
    meta_adapter,
    trace,
)
from onereplay.bench.inputs import processor_outputs
from onereplay.bench.profile import batch_of
from onereplay.bench.roofline import encoder_flops
from onereplay.encoder import load_model
from onereplay.errors import ConfigError
from tests.bench.synthetic import profile

PLAIN = EncoderCudaGraphConfig(optimize=())
TINY = ("qwen2_5_vl-7b@tiny", "internvl3-1b@tiny", "lfm2_vl-1.6b@tiny", "gemma4-e4b@tiny", "idefics3-8b@tiny")
GPU = Gpu(tflops=550, tb_s=4.1, launch_us=40, kernel_us=5)


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_that_are_counted_when_the_tower_runs(name: str) -> None:
    """One image of 256 tokens, or tiles of one size: sequences, and windows, of equal length."""
    real = adapter_for(load_model(f"preset:{name}", "cpu"))
    shape = batch_of(real, "vision", 256)
    counted = encoder_flops(real, processor_outputs(real, shape, torch.float32))
    assert trace(meta_adapter(f"preset:{name}", PLAIN), "vision", 256).flops == counted


def test_every_path_of_a_multi_path_model_is_seen() -> None:
    adapter = meta_adapter("preset:deepseek_ocr@tiny", PLAIN)
    assert all(trace(adapter, path, adapter.unit(path)).flops > 0 for path in adapter.paths())


def test_a_published_tower_needs_no_memory_for_weights() -> None:
    adapter = meta_adapter("preset:qwen2_5_vl-72b", PLAIN)
    assert all(weight.is_meta for weight in adapter.weights)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------

WEIGHT, INPUT, PRODUCT, SUM, ACTIVE, RESULT = range(6)
HAND_MADE = Trace(
    items=1,
    operations=(
        Operation("mm", 1000, ((INPUT, 10), (WEIGHT, 40)), ((PRODUCT, 20),)),
        Operation("add", 0, ((PRODUCT, 20), (INPUT, 10)), ((SUM, 20),)),
        Operation("gelu", 0, ((SUM, 20),), ((ACTIVE, 20),)),
        Operation("mm", 1000, ((ACTIVE, 20), (WEIGHT, 40)), ((RESULT, 10),)),
    ),
    results=frozenset((RESULT,)),
)
"""Two products with two operations between them."""


def test_each_operation_is_a_kernel_that_reads_and_writes_memory() -> None:
    assert HAND_MADE.kernels(fused=False) == [
        Kernel("mm", 1000, 70),
        Kernel("add", 0, 50),
        Kernel("gelu", 0, 40),
        Kernel("mm", 1000, 70),
    ]


def test_what_is_fused_keeps_what_lies_between_in_registers() -> None:
    """The sum is neither written nor read: the kernel reads product and input and writes the activation."""
    assert HAND_MADE.kernels(fused=True) == [
        Kernel("mm", 1000, 70),
        Kernel("2 fused", 0, 50),
        Kernel("mm", 1000, 70),
    ]


def test_intermediate_results_are_alive_until_their_last_use() -> None:
    """Unfused: product and sum, then sum and activation, 40 bytes each. Fused: product and activation."""
    assert HAND_MADE.peak_bytes(fused=False) == 40
    assert HAND_MADE.peak_bytes(fused=True) == 40
    longer = dataclasses.replace(HAND_MADE, results=frozenset((PRODUCT, RESULT)))
    assert longer.peak_bytes(fused=False) == 60


def test_a_kernel_takes_its_work_or_its_memory_and_a_fixed_cost() -> None:
    gpu = Gpu(tflops=100, tb_s=2, launch_us=40, kernel_us=5)
    assert Kernel("mm", 10**12, 1).milliseconds(gpu) == pytest.approx(10 + 0.005)
    assert Kernel("add", 0, 2 * 10**9).milliseconds(gpu) == pytest.approx(1 + 0.005)


# ---------------------------------------------------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------------------------------------------------


def test_a_replay_is_gpu_time_and_an_eager_forward_is_bound_by_the_slower_of_gpu_and_launches() -> None:
    name, counts = "preset:internvl3-1b@tiny", (16, 64)
    idle = analytic_profile(name, dataclasses.replace(GPU, launch_us=1e-9), counts=counts)
    busy = analytic_profile(name, dataclasses.replace(GPU, launch_us=1e4), counts=counts)
    for free, bound in zip(idle.paths["vision"].points, busy.paths["vision"].points, strict=True):
        assert free.replay_ms is not None
        assert free.eager_ms == pytest.approx(free.replay_ms)
        assert bound.eager_ms == 10 * busy.launches  # type: ignore[operator]
        assert bound.replay_ms == pytest.approx(free.replay_ms + 10), "one launch"


def test_compiled_blocks_have_fewer_launches_and_less_memory() -> None:
    fused, plain = (analytic_profile("preset:qwen2_5_vl-7b@tiny", GPU, c, counts=(64,)) for c in (None, PLAIN))
    assert fused.launches is not None
    assert plain.launches is not None
    assert fused.launches < plain.launches
    assert fused.capture.pool_mib <= plain.capture.pool_mib
    assert fused.capture.static_mib == plain.capture.static_mib


def test_a_published_tower_is_about_what_was_measured_on_an_h200() -> None:
    """benchmarks/results/one_replay_internvl3-8b_h200_2026-11-29.md: replays of 256, 1,024 and 5,120 tokens. 20 %: the
    four numbers stand for every kernel, and were fitted to this tower and two others."""
    points = analytic_profile("preset:internvl3-8b", GPU, counts=(256, 1024, 5120)).paths["vision"].points
    assert [point.replay_ms for point in points] == pytest.approx([2.98, 7.08, 34.0], rel=0.2)


def test_a_profile_beside_itself_is_1() -> None:
    one = profile()
    rows = compared(one, one)
    assert len(rows) == len(one.paths["vision"].points)
    assert {(row.replay_ratio, row.eager_ratio) for row in rows} == {(1.0, 1.0)}


def test_only_presets_are_computed() -> None:
    with pytest.raises(ConfigError, match="is no preset"):
        analytic_profile("Qwen/Qwen2.5-VL-7B-Instruct", GPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tflops=550,tb_s=4.1,launch_us=40", "kernel_us is unknown or missing"),
        ("tflops=550,tb_s=4.1,launch_us=40,kernel_us=5,price=2", "price is unknown or missing"),
        ("tflops=fast", "is no number"),
        ("tflops=550,tb_s=0,launch_us=40,kernel_us=5", "tb_s=0.0 is not positive"),
        ("tflops=nan,tb_s=4,launch_us=40,kernel_us=5", "tflops=nan is not positive"),
        ("", "tflops, tb_s, launch_us, kernel_us is unknown or missing"),
    ],
)
def test_a_gpu_is_four_positive_numbers(text: str, message: str) -> None:
    assert Gpu.parse("tflops=550, tb_s=4.1,launch_us=40,kernel_us=5") == GPU
    with pytest.raises(ConfigError, match=message):
        Gpu.parse(text)
