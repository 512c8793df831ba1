"""Variable-length attention: the reference, the choice of a back end, the operator, and its use by transformers.

Tolerances: a weighted mean of values below 5 in a type of precision `eps` is off by a few `eps` times that size, and
the weights by the error of the logits (at most 128 products), so 64 `eps` absolute covers both. A row that attends to
one wrong row differs by more than 1e-2 at the sizes used here; float32 leaves 8e-6.
"""

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface, AttentionMaskInterface, Qwen2_5_VLConfig, Siglip2VisionConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

from onereplay.attention import backends, resolve_backend, varlen_attention
from onereplay.attention.backends import FA4_MIN_SEQLEN, HEAD_SIZES, SHORT_MAX_SEQLEN, fa4_installed
from onereplay.attention.interface import PREFIX, as_mask, use_varlen
from onereplay.config import ATTENTION_BACKENDS
from onereplay.errors import ConfigError, MissingDependencyError, OnereplayError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAME = PREFIX + "auto"


def tolerance(dtype: torch.dtype) -> float:
    return 64 * torch.finfo(dtype).eps


def offsets(*bounds: int) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def heads(
    rows: int, num_heads: int = 2, key_heads: int = 2, size: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of random rows."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, n, size, generator=generator) for n in (num_heads, key_heads, key_heads))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Softmax attention of each sequence, one head and one row at a time, in float64; NaN for rows of no sequence."""
    q, k, v = q.double(), k.double(), v.double()
    shared = q.shape[1] // k.shape[1]
    output = torch.full_like(q, torch.nan)
    for start, end in pairwise(bounds):
        for head in range(q.shape[1]):
            keys, values = k[start:end, head // shared], v[start:end, head // shared]
            for row in range(start, end):
                logits = (keys * q[row, head]).sum(1) * scale
                weights = (logits - logits.max()).exp()
                output[row, head] = (weights.unsqueeze(1) * values).sum(0) / weights.sum()
    return output


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance(dtype), equal_nan=True)


# ------------------------------------------------------------------ the reference


@pytest.mark.parametrize(("num_heads", "key_heads"), [(2, 2), (4, 2), (3, 1)], ids=["equal", "grouped", "one key head"])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_the_reference_is_softmax_attention_inside_each_sequence(size: int, num_heads: int, key_heads: int) -> None:
    q, k, v = heads(13, num_heads, key_heads, size)
    bounds, scale = [0, 1, 6, 6, 13], size**-0.5
    found = varlen_attention(q, k, v, offsets(*bounds), 7, scale, "reference")
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    assert found.is_contiguous()
    assert_close(found, by_hand(q, k, v, bounds, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_reference_keeps_the_type_of_the_query(dtype: torch.dtype) -> None:
    q, k, v = heads(9, dtype=dtype)
    found = varlen_attention(q, k, v, offsets(0, 4, 9), 5, 0.25, "reference")
    assert found.dtype == dtype
    assert_close(found, by_hand(q, k, v, [0, 4, 9], 0.25), dtype)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.floats(0.05, 1.0), st.integers(0, 99))
def test_any_lengths_empty_ones_too_and_any_scale(lengths: list[int], scale: float, seed: int) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    q, k, v = heads(bounds[-1], size=8, seed=seed)
    found = varlen_attention(q, k, v, offsets(*bounds), max(1, *lengths), scale, "reference")
    assert_close(found, by_hand(q, k, v, bounds, scale))


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As one projection gives them: `(P, 3, H, D)`."""
    return torch.stack([q, k, v], dim=1).unbind(1)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As transformers keeps them: `(H, P, D)`."""
    return tuple(rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (q, k, v))


def every_second_row(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(rows.repeat_interleave(2, dim=0)[::2] for rows in (q, k, v))


@pytest.mark.parametrize("strided", [interleaved, heads_first, every_second_row])
def test_strided_inputs_give_the_same_contiguous_result(strided: Callable[..., tuple[Tensor, ...]]) -> None:
    q, k, v = heads(10)
    query, key, value = strided(q, k, v)
    assert not query.is_contiguous()
    found = varlen_attention(query, key, value, offsets(0, 3, 10), 7, 0.25, "reference")
    assert found.is_contiguous()
    assert_close(found, by_hand(q, k, v, [0, 3, 10], 0.25))


def test_rows_of_no_sequence_are_nan_and_no_others() -> None:
    q, k, v = heads(10)
    found = varlen_attention(q, k, v, offsets(2, 5, 7), 3, 0.25, "reference")
    assert found[:2].isnan().all()
    assert found[7:].isnan().all()
    assert found[2:7].isfinite().all()
    assert_close(found, by_hand(q, k, v, [2, 5, 7], 0.25))


def test_nan_in_one_sequence_does_not_reach_another() -> None:
    q, k, v = heads(10)
    expected = by_hand(q, k, v, [0, 6, 10], 0.25)
    for rows in (q, k, v):
        rows[6:] = torch.nan
    found = varlen_attention(q, k, v, offsets(0, 6, 10), 6, 0.25, "reference")
    assert_close(found[:6], expected[:6])


@pytest.mark.parametrize("bound", [1, 6])
def test_a_sequence_above_max_seqlen_is_an_error(bound: int) -> None:
    q, k, v = heads(10)
    with pytest.raises(ValueError, match=rf"a sequence of 7 patches exceeds max_seqlen={bound}"):
        varlen_attention(q, k, v, offsets(0, 0, 7, 10), bound, 0.25, "reference")


def test_a_sequence_as_long_as_max_seqlen_is_allowed() -> None:
    q, k, v = heads(10)
    assert varlen_attention(q, k, v, offsets(0, 7, 10), 7, 0.25, "reference").isfinite().all()


# ------------------------------------------------------------------ the choice


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    def pretend(installed: bool, new_enough: bool) -> None:
        monkeypatch.setattr(backends, "fa4_installed", lambda: installed)
        monkeypatch.setattr(backends, "_fa4_runs_on", lambda device: new_enough)
        monkeypatch.setattr(backends, "triton_installed", lambda: True)

    backends._log_choice.cache_clear()
    return pretend


@pytest.mark.parametrize(
    ("name", "installed", "new_enough", "max_seqlen", "chosen"),
    [
        ("auto", True, True, FA4_MIN_SEQLEN, "fa4"),
        ("auto", True, True, 4096, "fa4"),
        ("auto", True, True, FA4_MIN_SEQLEN - 1, "fa2"),
        ("auto", True, True, SHORT_MAX_SEQLEN, "short"),
        ("auto", True, True, SHORT_MAX_SEQLEN + 1, "fa2"),
        ("auto", True, False, 4096, "fa2"),
        ("auto", False, True, 4096, "fa2"),
        ("auto", False, False, 64, "short"),
        ("short", False, False, 64, "short"),
        ("fa2", True, True, 4096, "fa2"),
        ("fa2", False, False, 64, "fa2"),
        ("fa4", True, True, 4096, "fa4"),
        ("fa4", True, True, 64, "fa4"),
    ],
)
def test_the_back_end_on_cuda(
    name: str, installed: bool, new_enough: bool, max_seqlen: int, chosen: str, machine: Callable[[bool, bool], None]
) -> None:
    machine(installed, new_enough)
    assert resolve_backend(name, CUDA, max_seqlen) == chosen


def test_without_triton_auto_takes_fa2_for_short_sequences(
    machine: Callable[[bool, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(True, True)
    monkeypatch.setattr(backends, "triton_installed", lambda: False)
    assert resolve_backend("auto", CUDA, SHORT_MAX_SEQLEN) == "fa2"


@pytest.mark.parametrize(
    ("name", "installed", "new_enough", "error", "message"),
    [
        ("reference", True, True, ConfigError, r"attention='reference' reads lengths on the host.*use auto"),
        ("fa4", False, True, MissingDependencyError, r"needs FlashAttention 4: pip install \"onereplay\[gpu\]\""),
        ("fa4", False, False, MissingDependencyError, r"pip install"),
        ("fa4", True, False, ConfigError, r"needs compute capability 9\.0 or newer, cuda is older; use auto or fa2"),
    ],
)
def test_a_back_end_that_cannot_run_on_cuda_is_an_error_with_the_fix(
    name: str,
    installed: bool,
    new_enough: bool,
    error: type[Exception],
    message: str,
    machine: Callable[[bool, bool], None],
) -> None:
    machine(installed, new_enough)
    with pytest.raises(error, match=message):
        resolve_backend(name, CUDA, 4096)


@pytest.mark.parametrize("max_seqlen", [64, 4096])
@pytest.mark.parametrize("name", ["auto", "reference"])
def test_on_the_cpu_the_reference_runs(name: str, max_seqlen: int, machine: Callable[[bool, bool], None]) -> None:
    machine(True, True)
    assert resolve_backend(name, CPU, max_seqlen) == "reference"


@pytest.mark.parametrize("name", ["fa2", "fa4"])
def test_a_cuda_back_end_on_the_cpu_is_an_error_with_the_fix(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"attention='{name}' needs a CUDA device, the encoder is on cpu; use auto or reference"
    ):
        resolve_backend(name, CPU, 64)


def test_the_choice_of_auto_is_logged_once_a_kind(
    machine: Callable[[bool, bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(True, True)
    with caplog.at_level(logging.INFO, logger="onereplay"):
        for max_seqlen in (100, 4096, 64, 200, 5000, 16):
            resolve_backend("auto", CUDA, max_seqlen)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: fa2 for sequences of up to 256 patches",
        "attention: fa4 for sequences longer than 256 patches",
        "attention: short for sequences of up to 64 patches",
    ]


@pytest.fixture
def forget() -> Iterator[None]:
    """What was found out about the package is asked anew, before and after."""
    fa4_installed.cache_clear()
    yield
    fa4_installed.cache_clear()


def fails_with(error: Exception) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise error

    return fail


@pytest.mark.usefixtures("forget")
def test_looking_for_a_package_that_is_absent_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", fails_with(ModuleNotFoundError("flash_attn")))
    assert not fa4_installed()


@pytest.mark.usefixtures("forget")
def test_a_broken_package_counts_as_absent_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(importlib, "import_module", fails_with(ImportError("undefined symbol")))
    assert not fa4_installed()
    assert "undefined symbol" in caplog.text


# ------------------------------------------------------------------ the operator


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    output: Tensor = varlen_attention(q, k, v, cu_seqlens, 8, 0.25, "reference")
    return output


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_holds_one_node_that_obeys_new_offsets(mode: Any) -> None:
    q, k, v = heads(8)
    trace = make_fx(attend, tracing_mode=mode)(q, k, v, offsets(0, 8, 8, 8))
    calls = [node.target for node in trace.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.onereplay.varlen_attention.default]
    for bounds in ([0, 8, 8, 8], [0, 1, 5, 8], [0, 0, 3, 8]):
        assert_close(trace(q, k, v, offsets(*bounds)), by_hand(q, k, v, bounds, 0.25))


def test_a_trace_for_any_number_of_rows_takes_another_one() -> None:
    trace = make_fx(attend, tracing_mode="symbolic")(*heads(8), offsets(0, 8))
    q, k, v = heads(12)
    assert_close(trace(q, k, v, offsets(0, 8, 12)), by_hand(q, k, v, [0, 8, 12], 0.25))


@pytest.mark.parametrize("key_heads", [4, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_the_operator_is_registered_as_pytorch_demands(strided: bool, key_heads: int) -> None:
    q, k, v = heads(8, 4, key_heads)
    if strided:
        q, k, v = heads_first(q, k, v)
    torch.library.opcheck(
        torch.ops.onereplay.varlen_attention.default, (q, k, v, offsets(0, 3, 3, 8), 5, 0.25, "reference")
    )


# ------------------------------------------------------------------ transformers calls it


@pytest.fixture
def config() -> Siglip2VisionConfig:
    return Siglip2VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_patches=16,
        patch_size=2,
        attn_implementation="sdpa",
    )


def batched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(P, H, D)` as transformers hands it over: `(1, H, P, D)`."""
    return q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, name: str = NAME, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls by this name."""
    result: tuple[Tensor, Tensor | None] = AttentionInterface()[name](module, query, key, value, mask, **options)
    return result


MODULE: Any = torch.nn.Module()
QKV = heads(10, size=8)
BOUNDS = [0, 4, 10]
EXPECTED = by_hand(*QKV, BOUNDS, 0.25)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_a_name_for_each_back_end_is_registered_for_attention_and_masks_and_contains_flash(backend: str) -> None:
    assert "flash" in PREFIX
    assert PREFIX + backend in AttentionInterface()
    assert PREFIX + backend in AttentionMaskInterface()


def test_offsets_of_the_qwen_line_are_obeyed() -> None:
    output, weights = attention_forward(
        MODULE, *batched(*QKV), None, scaling=0.25, cu_seq_lens_q=offsets(*BOUNDS), max_length_q=6, is_causal=False
    )
    assert weights is None
    assert output.shape == (1, 10, 2, 8)
    assert_close(output[0], EXPECTED)


def test_offsets_in_place_of_a_mask_are_obeyed_inside_a_block(config: Siglip2VisionConfig) -> None:
    with use_varlen(config, "reference"):
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 6), scaling=0.25)
    assert_close(output[0], EXPECTED)


def test_the_scale_is_that_of_the_head_size_where_none_is_given(config: Siglip2VisionConfig) -> None:
    with use_varlen(config, "auto"):
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 6))
    assert_close(output[0], by_hand(*QKV, BOUNDS, 8**-0.5))


def test_the_bound_travels_with_the_offsets_and_takes_no_memory(config: Siglip2VisionConfig) -> None:
    mask = as_mask(offsets(*BOUNDS), 6)
    assert (tuple(mask.shape), mask.untyped_storage().nbytes()) == ((6, 3), 12)
    with use_varlen(config, "auto"), pytest.raises(ValueError, match="exceeds max_seqlen=2"):
        attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 2), scaling=0.25)


def test_sequences_of_one_row_have_a_bound_of_one(config: Siglip2VisionConfig) -> None:
    with use_varlen(config, "reference"):
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*range(11)), 1), scaling=0.25)
    assert_close(output[0], by_hand(*QKV, [*range(11)], 0.25))


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_the_back_end_of_the_name_is_the_one_that_runs(backend: str) -> None:
    def call() -> Tensor:
        output, _ = attention_forward(
            MODULE,
            *batched(*QKV),
            None,
            name=PREFIX + backend,
            scaling=0.25,
            cu_seq_lens_q=offsets(*BOUNDS),
            max_length_q=6,
        )
        return output[0]

    if backend in ("auto", "reference"):
        assert_close(call(), EXPECTED)
    else:
        with pytest.raises(ConfigError, match=f"'{backend}' needs a CUDA device"):
            call()


@pytest.mark.parametrize("inside", [False, True], ids=["outside a block", "inside a block"])
def test_offsets_without_a_bound_never_attend_across_sequences(inside: bool, config: Siglip2VisionConfig) -> None:
    call: dict[str, Any] = {"cu_seq_lens_q": offsets(*BOUNDS), "cu_seq_lens_k": offsets(*BOUNDS)}
    try:
        with use_varlen(config, "auto") if inside else nullcontext():
            output, _ = attention_forward(MODULE, *batched(*QKV), None, scaling=0.25, **call)
    except (OnereplayError, ValueError):
        return
    assert_close(output[0], EXPECTED)


MASKS = {
    "no mask": None,
    "a padding mask": (torch.arange(10) < 7).expand(1, 1, 10, 10),
    "an additive mask": torch.randn(1, 1, 10, 10, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside a block", "inside a block"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_call_that_is_not_ours_is_transformers_own(mask: str, inside: bool, config: Siglip2VisionConfig) -> None:
    expected, _ = sdpa_attention_forward(MODULE, *batched(*QKV), MASKS[mask], scaling=0.25, is_causal=False)
    if inside:
        with use_varlen(config, "auto"):
            output, _ = attention_forward(MODULE, *batched(*QKV), MASKS[mask], scaling=0.25, is_causal=False)
    else:
        output, _ = attention_forward(MODULE, *batched(*QKV), MASKS[mask], scaling=0.25, is_causal=False)
    assert torch.equal(output, expected)


def test_a_call_that_is_not_ours_keeps_every_argument() -> None:
    grouped: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    q, k, v = batched(*heads(10, 4, 2, 8))
    expected, _ = sdpa_attention_forward(grouped, q, k, v, None, scaling=0.25, dropout=0.0)
    output, _ = attention_forward(grouped, q, k, v, None, scaling=0.25, dropout=0.0)
    assert torch.equal(output, expected)
    assert not torch.equal(output, sdpa_attention_forward(grouped, q, k, v, None, scaling=0.25, is_causal=False)[0])


def tiles() -> tuple[Tensor, Tensor, Tensor]:
    """`(tiles, heads, rows, D)` as transformers hands a batch over."""
    q, k, v = torch.randn(3, 4, 5, 2, 8, generator=torch.Generator().manual_seed(5)).unbind(0)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def test_tiles_attend_to_themselves_alone_through_the_operator(config: Siglip2VisionConfig) -> None:
    q, k, v = tiles()
    with use_varlen(config, "reference", tiles=True):
        output, _ = attention_forward(MODULE, q, k, v, None, scaling=0.25)
        trace = make_fx(lambda q, k, v: attention_forward(MODULE, q, k, v, None, scaling=0.25)[0])(q, k, v)
    assert output.shape == (4, 5, 2, 8)
    for tile in range(4):
        rows = [part[tile].transpose(0, 1) for part in (q, k, v)]
        assert_close(output[tile], by_hand(rows[0], rows[1], rows[2], [0, 5], 0.25))
    assert torch.ops.onereplay.varlen_attention.default in [node.target for node in trace.graph.nodes]


def test_tiles_with_a_mask_are_transformers_own(config: Siglip2VisionConfig) -> None:
    mask = (torch.arange(5) < 3).expand(4, 1, 5, 5)
    expected, _ = sdpa_attention_forward(MODULE, *tiles(), mask, scaling=0.25, is_causal=False)
    with use_varlen(config, "auto", tiles=True):
        output, _ = attention_forward(MODULE, *tiles(), mask, scaling=0.25, is_causal=False)
    assert torch.equal(output, expected)


def plain_tiles() -> Tensor:
    """A batch without a mask under the name of a back end that would refuse the CPU, were it ours."""
    output, _ = attention_forward(MODULE, *tiles(), None, name=PREFIX + "fa2", scaling=0.25, is_causal=False)
    return output


def test_a_batch_outside_a_block_of_tiles_is_transformers_own(config: Siglip2VisionConfig) -> None:
    expected, _ = sdpa_attention_forward(MODULE, *tiles(), None, scaling=0.25, is_causal=False)
    with use_varlen(config, "fa2", tiles=True), pytest.raises(ConfigError, match="'fa2'"):
        plain_tiles()
    assert torch.equal(plain_tiles(), expected)
    with use_varlen(config, "fa2"):
        assert torch.equal(plain_tiles(), expected)


# ------------------------------------------------------------------ the name of a tower's attention


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("name", ["sdpa", "eager", None])
def test_a_block_switches_the_name_and_restores_it(name: str | None, backend: str, config: Siglip2VisionConfig) -> None:
    config._attn_implementation = name
    with use_varlen(config, backend):
        assert config._attn_implementation == PREFIX + backend
    assert config._attn_implementation == name


def test_a_block_that_raises_restores_the_name_and_the_tiles(config: Siglip2VisionConfig) -> None:
    expected, _ = sdpa_attention_forward(MODULE, *tiles(), None, scaling=0.25, is_causal=False)
    with use_varlen(config, "auto"):
        with pytest.raises(KeyError), use_varlen(config, "auto", tiles=True):
            raise KeyError
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 6), scaling=0.25)
        assert_close(output[0], EXPECTED)
        assert torch.equal(plain_tiles(), expected)
    assert config._attn_implementation == "sdpa"


def test_blocks_nest(config: Siglip2VisionConfig) -> None:
    with use_varlen(config, "auto"):
        with use_varlen(config, "auto"):
            pass
        assert config._attn_implementation == NAME
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 6), scaling=0.25)
        assert_close(output[0], EXPECTED)
    assert config._attn_implementation == "sdpa"


def test_an_outer_block_has_its_back_end_again_after_an_inner_one(config: Siglip2VisionConfig) -> None:
    with use_varlen(config, "auto"):
        with use_varlen(config, "fa2"):
            assert config._attn_implementation == PREFIX + "fa2"
        assert config._attn_implementation == NAME
    assert config._attn_implementation == "sdpa"


def test_blocks_of_two_towers_are_independent(config: Siglip2VisionConfig) -> None:
    other = Siglip2VisionConfig(attn_implementation="eager")
    with use_varlen(config, "auto"):
        with use_varlen(other, "auto"):
            pass
        assert (config._attn_implementation, other._attn_implementation) == (NAME, "eager")
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("fails", [False, True], ids=["first block ends", "first block raises"])
def test_overlapping_blocks_of_two_threads_restore_the_name_when_the_last_one_ends(
    fails: bool, config: Siglip2VisionConfig
) -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()
    seen: list[str | None] = []

    def first() -> None:
        try:
            with use_varlen(config, "auto"):
                entered.set()
                leave.wait(60)
                if fails:
                    raise KeyError
        except KeyError:
            pass
        seen.append(config._attn_implementation)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with use_varlen(config, "auto"):
        leave.set()
        assert left.wait(60)
        assert config._attn_implementation == NAME
        output, _ = attention_forward(MODULE, *batched(*QKV), as_mask(offsets(*BOUNDS), 6), scaling=0.25)
    thread.join()
    assert seen == [NAME]
    assert config._attn_implementation == "sdpa"
    assert_close(output[0], EXPECTED)


def in_a_thread_beside(config: Any, work: Callable[[], Tensor]) -> Tensor:
    """The result of `work` in another thread while this one holds a block open."""
    results: list[Tensor] = []
    with use_varlen(config, "auto", tiles=True):
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join()
    return results[0]


def test_a_padding_mask_is_not_dropped_under_the_name(config: Siglip2VisionConfig) -> None:
    """A plain forward of the user's in another thread, while a block is open."""
    torch.manual_seed(0)
    model = Siglip2VisionModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 12, 12, generator=generator)
    shapes, mask = torch.tensor([[3, 4], [2, 3]]), torch.ones(2, 12, dtype=torch.int32)
    mask[1, 6:] = 0

    @torch.no_grad()
    def plain(pixels: Tensor = pixels, mask: Tensor = mask) -> Tensor:
        hidden: Tensor = model(pixels, mask, shapes).last_hidden_state
        return hidden

    expected = plain()
    assert (plain(mask=torch.ones_like(mask)) - expected)[1, :6].abs().max() > 1e-2, "the mask makes no difference"
    assert torch.equal(in_a_thread_beside(model.config, plain), expected)
    assert torch.equal(plain(), expected)


def test_a_plain_forward_of_the_qwen_line_under_the_name_is_right() -> None:
    """It gets offsets and a bound from transformers itself; equal to the plain result up to the order of additions."""
    vision = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 16,
            "patch_size": 2,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        }
    ).vision_config
    vision._attn_implementation = "sdpa"
    torch.manual_seed(0)
    tower = Qwen2_5_VisionTransformerPretrainedModel(vision).eval()
    grids = torch.tensor([[1, 4, 6], [2, 4, 4]])
    pixels = torch.randn(56, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def plain() -> Tensor:
        tokens: Tensor = tower(pixels, grid_thw=grids).pooler_output
        return tokens

    expected = plain()
    assert_close(in_a_thread_beside(tower.config, plain), expected)
