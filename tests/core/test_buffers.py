"""Layouts and how a batch fills them. Integers: every comparison is exact."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onereplay.core.buffers import Array, Buffers, Declaration, Layout, Offsets, Packed, Rows, Staged, Tail
from onereplay.core.items import PathSize
from onereplay.core.plan import Capacity
from onereplay.core.staging import Block, Staging, exact_buffers
from onereplay.errors import CapacityError

MERGE = 4
"""Patches of a token."""
WINDOW = 8
"""Patches of the longest window."""
DUMMY = 32
"""Patches of the longest dummy sequence."""

DECLARATIONS: tuple[Declaration, ...] = (
    Staged("pixels", "patches", (3,)),
    Rows("position_ids", "patches", width=2),
    Rows("window_index", "tokens", shift="tokens", tail=Tail.IDENTITY),
    Rows("gather", "tokens", width=MERGE, dtype=torch.int32, shift="patches"),
    Offsets("cu_seqlens", of="sequences", longest_dummy=DUMMY),
    Offsets("cu_windows", of="windows", longest_dummy=WINDOW),
)
METADATA = {declaration.name for declaration in DECLARATIONS if not isinstance(declaration, Staged)}
Frames = list[int]
"""Tokens of each frame of one item."""

frames_of_items = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), max_size=6)


def windows_of(tokens: int) -> list[int]:
    """One frame cut into windows, in patches."""
    full, rest = divmod(tokens * MERGE, WINDOW)
    return [WINDOW] * full + [rest] * (rest > 0)


def size_of(frames: Frames) -> PathSize:
    return PathSize(
        tokens=sum(frames),
        patches=sum(frames) * MERGE,
        sequences=len(frames),
        windows=sum(len(windows_of(tokens)) for tokens in frames),
        longest=max(frames) * MERGE,
    )


def piece_of(frames: Frames) -> dict[str, Array]:
    """Every entry is told apart from every other, zero is no entry."""
    tokens = sum(frames)
    return {
        "position_ids": np.arange(2, 2 + 2 * tokens * MERGE, dtype=np.int64).reshape(-1, 2),
        "window_index": np.arange(tokens, dtype=np.int64)[::-1],
        "gather": np.arange(tokens * MERGE, dtype=np.int64).reshape(-1, MERGE)[::-1],
        "cu_seqlens": np.array(frames, dtype=np.int64) * MERGE,
        "cu_windows": np.array([length for tokens in frames for length in windows_of(tokens)], dtype=np.int64),
    }


def packed_of(items: list[Frames]) -> Packed:
    sizes = [size_of(frames) for frames in items]
    pixels = [torch.full((size.patches, 3), float(index + 1)) for index, size in enumerate(sizes)]
    return Packed(sizes, [piece_of(frames) for frames in items], {"pixels": pixels})


def demand_of(items: list[Frames]) -> Capacity:
    """What the items ask together: an exact capacity."""
    sizes = [size_of(frames) for frames in items]
    return Capacity(
        tokens=sum(size.tokens for size in sizes),
        patches=sum(size.patches for size in sizes),
        sequences=sum(size.sequences for size in sizes),
        items=len(sizes),
        windows=sum(size.windows for size in sizes),
        longest=max((size.longest for size in sizes), default=0),
    )


@st.composite
def batches_in_capacities(draw: st.DrawFn) -> tuple[list[Frames], Capacity]:
    """A batch and a capacity that holds it, with or without room to spare in each dimension."""
    items = draw(frames_of_items)
    exact = demand_of(items)
    spare = st.integers(0, 40)
    tokens = max(1, exact.tokens + draw(spare))
    return items, Capacity(
        tokens=tokens,
        patches=tokens * MERGE,
        sequences=max(1, exact.sequences + draw(spare)),
        items=max(1, exact.items + draw(spare)),
        windows=max(1, exact.windows + draw(spare)),
        longest=exact.longest + draw(spare),
    )


def filled(layout: Layout, packed: Packed, block: Tensor | None = None) -> dict[str, Array]:
    """The metadata of a batch as numpy arrays, in a given or a fresh block."""
    block = torch.zeros(layout.num_bytes, dtype=torch.uint8) if block is None else block
    views: Mapping[str, Array] = {name: view.numpy() for name, view in layout.views(block).items()}
    layout.fill(views, packed)
    return {name: view.copy() for name, view in views.items()}


# ------------------------------------------------------------------ sequences


@given(batches_in_capacities())
def test_every_row_of_a_captured_shape_belongs_to_a_sequence(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    found = filled(Layout(DECLARATIONS, capacity, padded=True), packed_of(items))
    for name in ("cu_seqlens", "cu_windows"):
        assert found[name].dtype == np.int32
        assert found[name][0] == 0
        assert found[name][-1] == capacity.patches
        assert (np.diff(found[name]) >= 0).all()


@given(batches_in_capacities())
def test_real_sequences_come_first_then_bounded_dummies_then_empty_slots(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    layout = Layout(DECLARATIONS, capacity, padded=True)
    found = filled(layout, packed_of(items))
    for name, longest in (("cu_seqlens", DUMMY), ("cu_windows", WINDOW)):
        real = [length for frames in items for length in piece_of(frames)[name].tolist()]
        lengths = np.diff(found[name]).tolist()
        behind = lengths[len(real) :]
        dummies = [length for length in behind if length]
        assert lengths[: len(real)] == real
        assert sum(dummies) == capacity.patches - sum(real)
        assert all(length <= longest for length in dummies)
        assert behind == dummies + [0] * (len(behind) - len(dummies))


@given(batches_in_capacities())
def test_dummy_sequences_are_as_few_as_their_bound_allows(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    found = filled(Layout(DECLARATIONS, capacity, padded=True), packed_of(items))
    padding = capacity.patches - demand_of(items).patches
    for name, longest in (("cu_seqlens", DUMMY), ("cu_windows", WINDOW)):
        real = sum(len(piece_of(frames)[name]) for frames in items)
        assert np.count_nonzero(np.diff(found[name])) - real == -(-padding // longest)


@given(batches_in_capacities())
def test_no_sequence_exceeds_the_bound_that_attention_is_told(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    exact = replace(demand_of(items), items=len(items))
    for layout in (Layout(DECLARATIONS, capacity, padded=True), Layout(DECLARATIONS, exact, padded=False)):
        found, bounds = filled(layout, packed_of(items)), layout.bounds()
        assert bounds.keys() == {"cu_seqlens", "cu_windows"}
        for name, bound in bounds.items():
            assert isinstance(bound, int)
            assert bound >= 1
            assert bound >= np.diff(found[name]).max(initial=0)


def test_the_bound_grows_with_the_longest_sequence_and_not_with_the_budget() -> None:
    capacity = Capacity(tokens=1000, patches=4000, sequences=4, items=4, windows=9, longest=300)
    assert Layout(DECLARATIONS, capacity, padded=True).bounds() == {"cu_seqlens": 300, "cu_windows": WINDOW}
    short = replace(capacity, longest=5)
    assert Layout(DECLARATIONS, short, padded=True).bounds()["cu_seqlens"] == DUMMY
    assert Layout(DECLARATIONS, short, padded=False).bounds()["cu_seqlens"] == 5


@given(frames_of_items)
def test_an_exact_layout_has_the_real_sequences_alone(items: list[Frames]) -> None:
    exact = demand_of(items)
    found = filled(Layout(DECLARATIONS, exact, padded=False), packed_of(items))
    for name in ("cu_seqlens", "cu_windows"):
        real = [length for frames in items for length in piece_of(frames)[name].tolist()]
        assert np.diff(found[name]).tolist() == real
        assert found[name][-1] == exact.patches
    assert len(found["position_ids"]) == exact.patches
    assert len(found["window_index"]) == exact.tokens


@given(st.integers(1, 300))
def test_a_batch_of_nothing_is_all_dummies(tokens: int) -> None:
    capacity = Capacity(tokens=tokens, patches=tokens * MERGE, sequences=2, items=2, windows=2, longest=8)
    found = filled(Layout(DECLARATIONS, capacity, padded=True), Packed.empty(DECLARATIONS))
    assert found["cu_seqlens"][-1] == found["cu_windows"][-1] == capacity.patches
    assert np.diff(found["cu_seqlens"]).max() <= DUMMY
    assert not found["position_ids"].any()
    np.testing.assert_array_equal(found["window_index"], np.arange(tokens))


# ------------------------------------------------------------------ rows


@given(batches_in_capacities())
def test_rows_are_the_items_rows_in_order_and_zero_behind(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    found = filled(Layout(DECLARATIONS, capacity, padded=True), packed_of(items))["position_ids"]
    expected = np.zeros((capacity.patches, 2), dtype=np.int64)
    start = 0
    for frames in items:
        rows = piece_of(frames)["position_ids"]
        expected[start : start + len(rows)] = rows
        start += len(rows)
    np.testing.assert_array_equal(found, expected)


@given(batches_in_capacities())
def test_shifted_entries_point_at_their_own_items_rows(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    found = filled(Layout(DECLARATIONS, capacity, padded=True), packed_of(items))
    tokens = patches = 0
    for frames in items:
        piece, size = piece_of(frames), size_of(frames)
        rows = slice(tokens, tokens + size.tokens)
        np.testing.assert_array_equal(found["window_index"][rows], piece["window_index"] + tokens)
        np.testing.assert_array_equal(found["gather"][rows], piece["gather"] + patches)
        tokens, patches = tokens + size.tokens, patches + size.patches
    assert found["gather"].dtype == np.int32
    assert not found["gather"][tokens:].any()


@given(batches_in_capacities())
def test_an_identity_tail_keeps_the_window_index_a_permutation(case: tuple[list[Frames], Capacity]) -> None:
    items, capacity = case
    found = filled(Layout(DECLARATIONS, capacity, padded=True), packed_of(items))["window_index"]
    np.testing.assert_array_equal(np.sort(found), np.arange(capacity.tokens))
    real = demand_of(items).tokens
    np.testing.assert_array_equal(found[real:], np.arange(real, capacity.tokens))


def test_an_identity_tail_of_several_columns_holds_the_row_in_each() -> None:
    declarations = (Rows("pairs", "tokens", width=2, tail=Tail.IDENTITY),)
    capacity = Capacity(tokens=3, patches=3, sequences=1, items=1)
    packed = Packed([PathSize(1, 1, 1)], [{"pairs": np.array([[7, 8]])}], {})
    found = filled(Layout(declarations, capacity, padded=True), packed)["pairs"]
    assert found.tolist() == [[7, 8], [1, 1], [2, 2]]


@given(frames_of_items)
def test_filling_leaves_the_pieces_as_they_were(items: list[Frames]) -> None:
    packed = packed_of(items)
    filled(Layout(DECLARATIONS, demand_of(items), padded=False), packed)
    for piece, frames in zip(packed.pieces, items, strict=True):
        for name, array in piece_of(frames).items():
            np.testing.assert_array_equal(piece[name], array)


@given(batches_in_capacities(), st.integers(0, 255))
def test_what_a_block_held_before_is_never_visible(case: tuple[list[Frames], Capacity], garbage: int) -> None:
    items, capacity = case
    layout = Layout(DECLARATIONS, capacity, padded=True)
    stale = torch.full((layout.num_bytes + 999,), garbage, dtype=torch.uint8)
    fresh, reused = filled(layout, packed_of(items)), filled(layout, packed_of(items), stale)
    for name in METADATA:
        np.testing.assert_array_equal(reused[name], fresh[name])


@given(batches_in_capacities(), frames_of_items, st.integers(0, 50))
def test_a_bigger_batch_before_leaves_no_trace(
    case: tuple[list[Frames], Capacity], before: list[Frames], spare: int
) -> None:
    items, capacity = case
    earlier = demand_of(before)
    largest = Capacity(
        *(max(here, there) + spare for here, there in zip(_fields(capacity), _fields(earlier), strict=True))
    )
    largest = replace(largest, patches=largest.tokens * MERGE)
    layout, big = Layout(DECLARATIONS, capacity, padded=True), Layout(DECLARATIONS, largest, padded=True)
    block = torch.zeros(max(layout.num_bytes, big.num_bytes), dtype=torch.uint8)
    filled(big, packed_of(before), block)
    reused = filled(layout, packed_of(items), block)
    for name, fresh in filled(layout, packed_of(items)).items():
        np.testing.assert_array_equal(reused[name], fresh)


def _fields(capacity: Capacity) -> tuple[int, ...]:
    return (
        capacity.tokens,
        capacity.patches,
        capacity.sequences,
        capacity.items,
        capacity.windows,
        capacity.longest,
    )


# ------------------------------------------------------------------ where buffers lie


def ladder() -> list[Layout]:
    capacities = [
        Capacity(tokens=n, patches=n * MERGE, sequences=min(n, 16), items=16, windows=n, longest=n * MERGE)
        for n in (1, 3, 64, 65, 200)
    ]
    return [Layout(DECLARATIONS, capacity, padded=True) for capacity in capacities]


def spans(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """The bytes of each tensor, by address."""
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors.values())


def test_all_budgets_share_one_block_and_one_tensor_of_pixels() -> None:
    layouts = ladder()
    block = Block(layouts, torch.float32, torch.device("cpu"))
    assert block.metadata.nbytes == max(layout.num_bytes for layout in layouts)
    for layout in layouts:
        buffers = layout.buffers(block.metadata, block.staged)
        assert set(buffers) == METADATA | {"pixels"}
        for name in METADATA:
            assert buffers[name].untyped_storage().data_ptr() == block.metadata.data_ptr()
        assert buffers.pixels.data_ptr() == block.staged["pixels"].data_ptr()
        assert buffers.pixels.shape == (layout.capacity.patches, 3)


def test_the_buffers_of_one_budget_do_not_overlap() -> None:
    layouts = ladder()
    block = torch.zeros(max(layout.num_bytes for layout in layouts), dtype=torch.uint8)
    for layout in layouts:
        placed = spans(layout.views(block))
        for (_, end), (start, _) in pairwise(placed):
            assert end <= start
        assert placed[-1][1] <= block.data_ptr() + layout.num_bytes


def test_a_smaller_budget_uses_a_shorter_prefix_of_the_block() -> None:
    sizes = [layout.num_bytes for layout in ladder()]
    assert sizes == sorted(sizes)


@given(batches_in_capacities())
def test_buffers_have_the_declared_shape_and_type(case: tuple[list[Frames], Capacity]) -> None:
    _, capacity = case
    layout = Layout(DECLARATIONS, capacity, padded=True)
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    sequence_slots = capacity.sequences + -(-capacity.patches // DUMMY)
    window_slots = capacity.windows + -(-capacity.patches // WINDOW)
    assert {name: (tuple(view.shape), view.dtype) for name, view in views.items()} == {
        "position_ids": ((capacity.patches, 2), torch.int64),
        "window_index": ((capacity.tokens,), torch.int64),
        "gather": ((capacity.tokens, MERGE), torch.int32),
        "cu_seqlens": ((sequence_slots + 1,), torch.int32),
        "cu_windows": ((window_slots + 1,), torch.int32),
    }


# ------------------------------------------------------------------ names


def test_a_buffer_is_read_by_attribute_or_key() -> None:
    buffers = Buffers({"pixels": torch.ones(2), "cu_seqlens": torch.zeros(3)})
    assert buffers.pixels is buffers["pixels"]
    assert list(buffers) == ["pixels", "cu_seqlens"]
    assert len(buffers) == 2


def test_an_unknown_buffer_is_an_error_that_names_the_declared_ones() -> None:
    buffers = Buffers({"pixels": torch.ones(2), "cu_seqlens": torch.zeros(3)})
    with pytest.raises(AttributeError, match=r"no buffer 'pixel' is declared; declared are pixels, cu_seqlens"):
        _ = buffers.pixel
    with pytest.raises(KeyError, match="pixel"):
        _ = buffers["pixel"]


@pytest.mark.parametrize("name", sorted(METADATA))
@pytest.mark.parametrize("position", [0, 1])
def test_a_piece_that_misses_a_name_is_an_error(name: str, position: int) -> None:
    items = [[3], [5]]
    packed = packed_of(items)
    pieces = [dict(piece) for piece in packed.pieces]
    del pieces[position][name]
    with pytest.raises(KeyError, match=rf"declares .*{name}"):
        filled(Layout(DECLARATIONS, demand_of(items), padded=True), replace(packed, pieces=pieces))


def test_a_piece_with_an_undeclared_name_is_an_error() -> None:
    packed = packed_of([[3]])
    pieces = [{**packed.pieces[0], "cu_seqlen": np.array([12])}]
    with pytest.raises(KeyError, match="cu_seqlen"):
        filled(Layout(DECLARATIONS, demand_of([[3]]), padded=True), replace(packed, pieces=pieces))


# ------------------------------------------------------------------ overflow

ITEMS: list[Frames] = [[5, 5], [6]]
EXACT = demand_of(ITEMS)


@pytest.mark.parametrize("padded", [True, False], ids=["captured", "exact"])
@pytest.mark.parametrize(
    ("smaller", "name"),
    [
        ({"tokens": EXACT.tokens - 1}, "window_index"),
        ({"patches": EXACT.patches - 1}, "position_ids"),
        ({"sequences": 0}, "cu_seqlens"),
        ({"windows": 0}, "cu_windows"),
    ],
)
def test_an_overflow_is_an_error_that_names_the_buffer_and_the_room(
    smaller: dict[str, int], name: str, padded: bool
) -> None:
    # Slots for dummies may take real sequences, so the captured shape gets dummies long enough to leave none spare.
    declarations = tuple(
        replace(part, longest_dummy=EXACT.patches) if isinstance(part, Offsets) else part for part in DECLARATIONS
    )
    layout = Layout(declarations, replace(EXACT, **smaller), padded=padded)
    with pytest.raises(CapacityError, match=rf"buffer '{name}' has room for \d+, the batch needs \d+"):
        filled(layout, packed_of(ITEMS))


def test_patches_of_sequences_beyond_the_capacity_are_an_error() -> None:
    declarations = (Offsets("cu_seqlens", of="sequences"),)
    packed = Packed([PathSize(4, 16, 1, longest=16)], [{"cu_seqlens": np.array([16])}], {})
    capacity = Capacity(tokens=4, patches=15, sequences=8, items=8, longest=16)
    with pytest.raises(CapacityError, match="'cu_seqlens' has room for 15, the batch needs 16"):
        filled(Layout(declarations, capacity, padded=True), packed)


@pytest.mark.parametrize("padded", [True, False], ids=["captured", "exact"])
def test_a_sequence_longer_than_the_bound_is_an_error(padded: bool) -> None:
    """Kernels are told the bound and cut off what exceeds it without a word."""
    declarations = tuple(
        replace(part, longest_dummy=4) if isinstance(part, Offsets) and part.of == "sequences" else part
        for part in DECLARATIONS
    )
    layout = Layout(declarations, replace(EXACT, longest=4), padded=padded)
    assert layout.bounds()["cu_seqlens"] < 24
    with pytest.raises(CapacityError, match="cu_seqlens"):
        filled(layout, packed_of(ITEMS))


def load(packed: Packed, capacity: Capacity, room: Capacity) -> Block:
    """Load a batch for one capacity into a block that has more room."""
    layout = Layout(DECLARATIONS, capacity, padded=True)
    layouts = [layout, Layout(DECLARATIONS, room, padded=True)]
    block = Block(layouts, torch.float32, torch.device("cpu"))
    Staging(layouts, torch.float32, torch.device("cpu")).load(packed, layout, block)
    return block


@pytest.mark.parametrize("parts", [1, 3], ids=["one source", "several sources"])
@pytest.mark.parametrize("spare", [0, 100], ids=["full block", "room in the block"])
@pytest.mark.parametrize("rows", [EXACT.patches + 3, EXACT.patches - 3], ids=["too many", "too few"])
def test_pixels_that_are_not_as_many_rows_as_the_sizes_say_are_an_error(rows: int, spare: int, parts: int) -> None:
    """Too many would be dropped, too few would leave an earlier batch's pixels in the last rows."""
    pixels: Any = torch.ones(rows, 3).chunk(parts)
    packed = replace(packed_of(ITEMS), staged={"pixels": pixels})
    room = replace(EXACT, patches=EXACT.patches + spare, tokens=EXACT.tokens + spare)
    with pytest.raises(CapacityError, match="pixels"):
        load(packed, EXACT, room)


@pytest.mark.parametrize("parts", [1, 3], ids=["one source", "several sources"])
@pytest.mark.parametrize("rows", [EXACT.patches + 3, EXACT.patches - 3], ids=["too many", "too few"])
def test_pixels_of_an_eager_batch_that_are_not_as_many_rows_as_the_sizes_say_are_an_error(
    rows: int, parts: int
) -> None:
    pixels: Any = torch.ones(rows, 3).chunk(parts)
    packed = replace(packed_of(ITEMS), staged={"pixels": pixels})
    with pytest.raises(CapacityError, match="pixels"):
        exact_buffers(packed, Layout(DECLARATIONS, EXACT, padded=False), torch.float32, torch.device("cpu"))
