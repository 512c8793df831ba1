"""The CUDA back ends of `varlen_attention` against float64.

Tolerance: the error against float64 on the same bf16 numbers, by norm, is at most 1.1 times that of PyTorch's
`scaled_dot_product_attention` in bf16 called for each sequence alone: both round the weights and the output to bf16 and
sum in float32, in another order. A row that sees one foreign row has an error of another size.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onereplay.attention import resolve_backend, varlen_attention
from onereplay.attention.backends import FA4_MIN_SEQLEN, HEAD_SIZES, SHORT_MAX_SEQLEN, fa4_installed
from onereplay.checking import HALF_RATIO
from onereplay.errors import ConfigError, MissingDependencyError
from onereplay.optimize import kernels
from tests.gpu.conftest import made, relative_error

BACKENDS = ["fa2", "fa4"]
SHORT = (5, 0, 64, 64, 1, 0, 33, 64, 0, 0)
"""What `short` takes."""
RAGGED = (5, 0, 64, 256, 1, 0, 300, 33, 0, 0)
"""Empty sequences in the middle and at the end."""
PADDED = (256, 64, 64, 7, 1024, 1024, 9, 0, 0, 0, 0)
"""As a captured layout has them: real sequences, dummies that cover the padding rows, empty slots."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "fa4" and not fa4_installed():
        pytest.skip("flash-attn-4 is not installed")
    return name


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def heads(rows: int, num_heads: int, key_heads: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as slices of one product, as towers make them: not contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (rows, num_heads + 2 * key_heads, size)
    joined = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    q, k, v = joined.split([num_heads, key_heads, key_heads], dim=1)
    return q, k, v


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """PyTorch's attention for each sequence alone, in the dtype of the query."""
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start, end in pairwise([0, *accumulate(lengths)]):
        if end > start:
            query, key, value = (rows[start:end].transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            found = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
            output[start:end] = found[0].transpose(0, 1)
    return output


def assert_right(found: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> None:
    exact = one_by_one(q.double(), k.double(), v.double(), lengths, scale)
    ours, theirs = (relative_error(each, exact) for each in (found, one_by_one(q, k, v, lengths, scale)))
    assert found.shape == q.shape
    assert found.is_contiguous()
    assert ours <= HALF_RATIO * theirs, f"error {ours:.2e}, sdpa {theirs:.2e}"


@pytest.mark.parametrize("lengths", [RAGGED, PADDED, (1025,) * 3], ids=["ragged", "padded layout", "tiles"])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_each_sequence_attends_to_itself(backend: str, size: int, lengths: tuple[int, ...]) -> None:
    q, k, v = heads(sum(lengths), 4, 4, size)
    found = varlen_attention(q, k, v, offsets(lengths), max(lengths), size**-0.5, backend)
    assert_right(found, q, k, v, lengths, size**-0.5)


@pytest.mark.parametrize(("num_heads", "key_heads"), [(8, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 72, 80, 128])
def test_heads_may_share_keys(backend: str, size: int, num_heads: int, key_heads: int) -> None:
    q, k, v = heads(sum(RAGGED), num_heads, key_heads, size)
    found = varlen_attention(q, k, v, offsets(RAGGED), 300, 0.1, backend)
    assert_right(found, q, k, v, RAGGED, 0.1)


@pytest.mark.parametrize(("num_heads", "key_heads"), [(4, 4), (8, 2), (16, 16)], ids=str)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_short_sequences_attend_to_themselves(size: int, num_heads: int, key_heads: int) -> None:
    lengths = SHORT * 20
    q, k, v = heads(sum(lengths), num_heads, key_heads, size)
    found = varlen_attention(q, k, v, offsets(lengths), 64, size**-0.5, "short")
    assert_right(found, q, k, v, lengths, size**-0.5)


@pytest.mark.parametrize(("size", "rotated"), [(80, 80), (64, 64), (72, 72), (80, 60), (128, 128)])
def test_short_attention_rotates_as_the_rotary_embedding_does(size: int, rotated: int) -> None:
    q, k, v = heads(sum(SHORT), 4, 4, size)
    angles = torch.rand(sum(SHORT), rotated // 2, device="cuda") * 6
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    from onereplay.attention.short import short_attention  # needs Triton

    found = short_attention(q, k, v, offsets(SHORT), size**-0.5, (cos, sin))
    for part in (q, k):
        kernels.rotate(part, cos, sin)
    assert_right(found, q, k, v, SHORT, size**-0.5)


def test_a_bound_that_short_cannot_hold_is_refused() -> None:
    q, k, v = heads(65, 4, 4, 64)
    with pytest.raises(ConfigError, match="'short' holds sequences of up to 64 patches, got 65"):
        varlen_attention(q, k, v, offsets((65,)), 65, 0.1, "short")


def test_a_bound_above_the_longest_sequence_changes_nothing(backend: str) -> None:
    """A graph has the bound of its budget, whatever the batch."""
    q, k, v = heads(sum(RAGGED), 4, 4, 80)
    found = varlen_attention(q, k, v, offsets(RAGGED), 4096, 80**-0.5, backend)
    assert_right(found, q, k, v, RAGGED, 80**-0.5)


@pytest.mark.parametrize("size", [64, 72, 80])
def test_a_captured_call_obeys_new_offsets_and_new_rows(backend: str, size: int) -> None:
    rows, slots, scale = 1024, 16, size**-0.5
    layouts = [(1024,), (64,) * 16, (500, 0, 3, 0, 521), (1, 1022, 1)]
    q, k, v = heads(rows, 4, 4, size)
    static = [part.clone() for part in (q, k, v)]
    bounds = offsets((1024,) + (0,) * (slots - 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        varlen_attention(static[0], static[1], static[2], bounds, rows, scale, backend)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = varlen_attention(static[0], static[1], static[2], bounds, rows, scale, backend)
    for seed, lengths in enumerate(layouts):
        padded = lengths + (0,) * (slots - len(lengths))
        fresh = heads(rows, 4, 4, size, seed)
        bounds.copy_(offsets(padded))
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        assert_right(output, *fresh, padded, scale)


def test_nothing_is_left_unwritten_in_a_padded_layout(backend: str) -> None:
    """Rows of dummy sequences are finite whatever memory the output gets."""
    q, k, v = heads(sum(PADDED), 4, 4, 80)
    for _ in range(3):
        trash = torch.full((sum(PADDED), 4, 80), torch.nan, dtype=torch.bfloat16, device="cuda")
        del trash
        found = varlen_attention(q, k, v, offsets(PADDED), 1024, 80**-0.5, backend)
        assert found.isfinite().all()


def test_auto_takes_fa4_for_long_sequences_where_it_is_installed_and_the_reference_is_refused() -> None:
    device = torch.device("cuda")
    assert resolve_backend("auto", device, SHORT_MAX_SEQLEN) == "short"
    assert resolve_backend("auto", device, SHORT_MAX_SEQLEN + 1) == "fa2"
    assert resolve_backend("auto", device, FA4_MIN_SEQLEN - 1) == "fa2"
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert resolve_backend("auto", device, FA4_MIN_SEQLEN) == ("fa4" if fa4_installed() and hopper else "fa2")
    with pytest.raises(ConfigError, match="no CUDA graph can hold it"):
        resolve_backend("reference", device, 64)
    if not fa4_installed():
        with pytest.raises(MissingDependencyError, match=r'pip install "onereplay\[gpu\]"'):
            resolve_backend("fa4", device, 64)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "lfm2_vl"])
def test_a_dtype_that_flash_attention_lacks_is_refused_in_words_before_capture(model_type: str) -> None:
    """Not by dropping every budget and failing in the first batch. A back end that can do float32 is fine too."""
    try:
        encoder = made(model_type, 64, dtype=torch.float32)
    except ConfigError as error:
        assert "float32" in str(error)  # noqa: PT017
        return
    with encoder:
        assert not encoder.report().capture.dropped
