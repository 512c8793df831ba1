"""How a batch reaches the static block: order, type, and how often memory is copied.

Values are copied or rounded once, so every comparison is exact.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onereplay.core.staging as staging_module
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Declaration, Layout, Offsets, Packed, Rows, Staged
from onereplay.core.items import PathSize
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Capacity
from onereplay.core.staging import TURNS, Block, Staging, exact_buffers
from onereplay.errors import CapacityError
from tests.core.dummy import DummyAdapter, DummyBatch, batch_of, picture

CPU = torch.device("cpu")
WIDTH = 3
DECLARATIONS: tuple[Declaration, ...] = (
    Staged("pixels", "patches", (WIDTH,)),
    Staged("tiles", "sequences", (2, 2)),
    Rows("places", "patches"),
    Offsets("cu_seqlens", of="sequences"),
)


def capacity_of(patches: int, sequences: int) -> Capacity:
    return Capacity(tokens=patches, patches=patches, sequences=sequences, items=99, longest=patches)


def packed_of(pixels: Sequence[Tensor], tiles: Sequence[Tensor]) -> Packed:
    """One item with these rows: a sequence a tile."""
    patches, sequences = sum(map(len, pixels)), sum(map(len, tiles))
    lengths = [patches // sequences] * sequences
    lengths[-1] += patches - sum(lengths)
    piece = {"places": np.arange(patches), "cu_seqlens": np.array(lengths, dtype=np.int64)}
    size = PathSize(patches, patches, sequences, longest=max(lengths))
    return Packed([size], [piece], {"pixels": pixels, "tiles": tiles})


def random_packed(rows: Sequence[int], tiles: Sequence[int], dtype: torch.dtype = torch.float32) -> Packed:
    generator = torch.Generator().manual_seed(sum(rows))
    return packed_of(
        [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in rows],
        [torch.randn(n, 2, 2, generator=generator).to(dtype) for n in tiles],
    )


def loaded(
    packed: Packed, layout: Layout, dtype: torch.dtype = torch.float32, into: Block | None = None
) -> Mapping[str, Tensor]:
    block = into or Block([layout], dtype, CPU)
    Staging([layout], dtype, CPU).load(packed, layout, block)
    return layout.buffers(block.metadata, block.staged)


rows_of_sources = st.lists(st.integers(1, 9), min_size=1, max_size=5)
LARGE = Layout(DECLARATIONS, capacity_of(64, 64), padded=True)


@given(rows_of_sources, rows_of_sources, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_rows_of_several_sources_follow_one_another(rows: list[int], tiles: list[int], dtype: torch.dtype) -> None:
    packed = random_packed(rows, tiles)
    found = loaded(packed, LARGE, dtype)
    for name in ("pixels", "tiles"):
        joined = torch.cat(list(packed.staged[name]))
        assert found[name].dtype == dtype
        assert torch.equal(found[name][: len(joined)], joined.to(dtype))


@pytest.mark.parametrize("rows", [[7], [3, 4]], ids=["one source", "two sources"])
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.uint8], ids=str)
def test_rows_are_rounded_to_the_models_type_as_torch_rounds_them(rows: list[int], source: torch.dtype) -> None:
    values = torch.arange(sum(rows) * WIDTH, dtype=torch.float64).view(-1, WIDTH) * 1.2345678
    pixels = values.to(source).split(rows)
    found = loaded(packed_of(pixels, [torch.ones(2, 2, 2)]), LARGE, torch.bfloat16)["pixels"]
    assert torch.equal(found[: sum(rows)], torch.cat(pixels).to(torch.bfloat16))


def test_sources_of_different_types_each_keep_their_value() -> None:
    pixels = [torch.full((2, WIDTH), 300.5, dtype=torch.float64), torch.full((2, WIDTH), 7, dtype=torch.uint8)]
    found = loaded(packed_of(pixels, [torch.ones(1, 2, 2)]), LARGE)["pixels"]
    assert found[:4, 0].tolist() == [300.5, 300.5, 7, 7]


def test_sources_may_have_any_strides() -> None:
    wide = torch.arange(60.0).view(WIDTH, 20).t()
    found = loaded(packed_of([wide[::2], wide[1::2]], [torch.ones(1, 2, 2)]), LARGE)["pixels"]
    assert torch.equal(found[:20], torch.cat([wide[::2], wide[1::2]]))


@given(rows_of_sources, rows_of_sources)
def test_staged_rows_behind_the_last_real_row_are_left_alone(rows: list[int], tiles: list[int]) -> None:
    block = Block([LARGE], torch.float32, CPU)
    for staged in block.staged.values():
        staged.fill_(-5)
    found = loaded(random_packed(rows, tiles), LARGE, into=block)
    assert (found["pixels"][sum(rows) :] == -5).all()
    assert (found["tiles"][sum(tiles) :] == -5).all()


def test_a_batch_of_nothing_writes_metadata_alone() -> None:
    block = Block([LARGE], torch.float32, CPU)
    for staged in block.staged.values():
        staged.fill_(-5)
    block.metadata.fill_(0xFF)
    found = loaded(Packed.empty(DECLARATIONS), LARGE, into=block)
    assert (found["pixels"] == -5).all()
    assert (found["tiles"] == -5).all()
    assert not found["places"].any()
    assert found["cu_seqlens"][-1] == LARGE.capacity.patches


def test_one_staging_serves_all_budgets_and_keeps_no_earlier_batch() -> None:
    layouts = [Layout(DECLARATIONS, capacity_of(n, n), padded=True) for n in (8, 16, 64)]
    staging, block = Staging(layouts, torch.float32, CPU), Block(layouts, torch.float32, CPU)
    for layout, rows in [(layouts[2], 60), (layouts[0], 5), (layouts[1], 16), (layouts[0], 8), (layouts[2], 33)]:
        packed = random_packed([rows], [1])
        staging.load(packed, layout, block)
        fresh = loaded(packed, layout)
        for name, tensor in layout.buffers(block.metadata, block.staged).items():
            real = rows if name == "pixels" else 1 if name == "tiles" else len(tensor)
            assert torch.equal(tensor[:real], fresh[name][:real])


def test_exact_buffers_hold_the_batch_and_nothing_else() -> None:
    packed = random_packed([3, 4], [1, 2])
    layout = Layout(DECLARATIONS, capacity_of(7, 3), padded=False)
    found = exact_buffers(packed, layout, torch.bfloat16, CPU)
    assert torch.equal(found.pixels, torch.cat(list(packed.staged["pixels"])).to(torch.bfloat16))
    assert torch.equal(found.tiles, torch.cat(list(packed.staged["tiles"])).to(torch.bfloat16))
    assert found.places.tolist() == list(range(7))
    assert found.cu_seqlens.tolist() == [0, 2, 4, 7]


def test_exact_buffers_share_no_memory_with_the_callers_tensors() -> None:
    packed = random_packed([7], [3])
    found = exact_buffers(packed, Layout(DECLARATIONS, capacity_of(7, 3), padded=False), torch.float32, CPU)
    assert found.pixels.data_ptr() != packed.staged["pixels"][0].data_ptr()


# ------------------------------------------------------------------ how often memory is copied


class Writes(TorchDispatchMode):
    """Counts the ATen calls that write into given storages, and all calls by name."""

    def __init__(self, **watched: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {tensor.untyped_storage().data_ptr(): name for name, tensor in watched.items()}
        self.written: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls[func.overloadpacket.__name__] += 1
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[position] if position < len(args) else kwargs.get(argument.name)
                if isinstance(target, Tensor) and target.untyped_storage().data_ptr() in self.names:
                    self.written[self.names[target.untyped_storage().data_ptr()]] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("rows", [[9], [4, 5], [1] * 9], ids=["one source", "two sources", "nine sources"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_crosses_in_one_copy_of_metadata_and_one_of_each_staged_tensor(
    rows: list[int], dtype: torch.dtype
) -> None:
    block, staging = Block([LARGE], dtype, CPU), Staging([LARGE], dtype, CPU)
    with Writes(metadata=block.metadata, **block.staged) as writes:
        staging.load(random_packed(rows, [1, 1]), LARGE, block)
    assert writes.written == {"metadata": 1, "pixels": 1, "tiles": 1}


def test_joining_sources_takes_no_copy_a_source() -> None:
    """Sources of the model's type are joined by one `cat` into the host block, whatever their number."""
    block, staging = Block([LARGE], torch.float32, CPU), Staging([LARGE], torch.float32, CPU)
    with Writes() as writes:
        staging.load(random_packed([1] * 20, [1, 1]), LARGE, block)
    assert writes.calls["copy_"] + writes.calls["_to_copy"] == 3  # metadata, pixels, tiles: host block to static block
    assert writes.calls["cat"] == 2  # pixels, tiles


DEVICE = torch.device("meta")
"""Stands for a device other than the host: copies to it can be counted."""


def test_an_exact_batch_crosses_in_one_copy_of_metadata_and_one_of_each_staged_tensor() -> None:
    layout = Layout(DECLARATIONS, capacity_of(7, 3), padded=False)
    with Writes() as writes:
        found = exact_buffers(random_packed([3, 4], [1, 2]), layout, torch.float32, DEVICE)
    assert writes.calls["_to_copy"] + writes.calls["copy_"] == 3
    assert writes.calls["cat"] == 2
    assert all(tensor.device.type == "meta" for tensor in found.values())


def on_device(packed: Packed) -> Packed:
    return replace(packed, staged={name: [part.to(DEVICE) for part in parts] for name, parts in packed.staged.items()})


@pytest.mark.parametrize("rows", [[9], [4, 5]], ids=["one source", "two sources"])
def test_pixels_on_the_device_do_not_go_through_the_host(rows: list[int]) -> None:
    block, staging = Block([LARGE], torch.float32, DEVICE), Staging([LARGE], torch.float32, DEVICE)
    host, packed = staging._turns[0].block, on_device(random_packed(rows, [1, 1]))
    with Writes(**host.staged) as writes:
        staging.load(packed, LARGE, block)
    assert not writes.written
    assert writes.calls["_to_copy"] == 0
    assert writes.calls["copy_"] == (3 if len(rows) == 1 else 2) - 1  # metadata, and a single source; tiles are joined


def test_an_exact_batch_takes_pixels_on_the_device_as_they_are() -> None:
    packed = on_device(random_packed([7], [3]))
    layout = Layout(DECLARATIONS, capacity_of(7, 3), padded=False)
    with Writes() as writes:
        found = exact_buffers(packed, layout, torch.float32, DEVICE)
    assert writes.calls["_to_copy"] + writes.calls["copy_"] + writes.calls["cat"] == 1  # metadata
    assert found.pixels.shape == (7, WIDTH)
    converted = exact_buffers(packed, layout, torch.bfloat16, DEVICE)
    assert converted.pixels.dtype == converted.tiles.dtype == torch.bfloat16


READERS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero"}


class HostReads(TorchFunctionMode):
    """Counts Python calls that would wait for the device to read a value."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READERS:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def encoded_batches() -> list[DummyBatch]:
    generator = torch.Generator().manual_seed(0)
    replayed = batch_of(picture(generator, 3, 5), picture(generator, 9))
    eager = batch_of(picture(generator, 100))
    return [replayed, eager]


def test_encoding_reads_nothing_from_the_device() -> None:
    manager = EncoderCudaGraphManager(DummyAdapter(), EncoderCudaGraphConfig(token_budgets=(32,), backend="traced"))
    manager.capture()
    batches = encoded_batches()
    with Writes() as aten, HostReads() as python:
        for batch in batches:
            manager.encode(batch)
    report = manager.report()
    assert report.replays == {"main": {32: 1}}
    assert report.eager == {"main": {"over the largest budget": 1}}
    assert aten.calls["index_add"] == 2, "the mode saw no forward"
    readers = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_consecutive"}
    assert not readers & aten.calls.keys()
    assert not python.reads


def test_a_replay_copies_metadata_pixels_and_results_once() -> None:
    manager = EncoderCudaGraphManager(DummyAdapter(), EncoderCudaGraphConfig(token_budgets=(32,), backend="traced"))
    manager.capture()
    path = manager._paths["main"]
    static = {
        "metadata": path.block.metadata,
        **path.block.staged,
        "features": path.outputs[0],
        "squares": path.outputs[1],
    }
    with Writes(**static) as writes:
        manager.encode(encoded_batches()[0])
    assert writes.written == dict.fromkeys(static, 1)


# ------------------------------------------------------------------ metadata that comes again

METADATA = DECLARATIONS[2:]


def keyed(patches: int, key: object = None, *, forgotten: bool = False) -> Packed:
    """A batch of metadata alone; `forgotten` brings no pieces, so what is loaded was kept."""
    sizes, pieces = [PathSize(patches, patches, 1, longest=patches)], [metadata_of(patches)]
    return Packed(sizes, [] if forgotten else pieces, {}, key)


def metadata_of(patches: int) -> dict[str, Any]:
    return {"places": np.arange(patches), "cu_seqlens": np.array([patches])}


def bytes_of(block: Block, layout: Layout) -> list[list[int]]:
    return [view.tolist() for view in layout.views(block.metadata).values()]


def test_a_batch_of_a_known_key_is_loaded_as_it_was_kept_whatever_came_between() -> None:
    layouts = [Layout(METADATA, capacity_of(n, n), padded=True) for n in (8, 16)]
    staging, block = Staging(layouts, torch.float32, CPU), Block(layouts, torch.float32, CPU)
    expected = {}
    for layout in layouts:
        for patches in (5, 7):
            staging.load(keyed(patches, patches), layout, block)
            expected[id(layout), patches] = bytes_of(block, layout)
    for patches in (7, 5):
        for layout in layouts:
            staging.load(keyed(3), layout, block)
            staging.load(keyed(patches, patches, forgotten=True), layout, block)
            assert bytes_of(block, layout) == expected[id(layout), patches]


def test_a_batch_without_a_key_is_not_kept() -> None:
    layout = Layout(METADATA, capacity_of(8, 8), padded=True)
    staging, block = Staging([layout], torch.float32, CPU), Block([layout], torch.float32, CPU)
    staging.load(keyed(5), layout, block)
    with pytest.raises(CapacityError):
        staging.load(keyed(5, forgotten=True), layout, block)


def test_kept_metadata_is_bounded_in_bytes_and_those_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(METADATA, capacity_of(64, 64), padded=True)
    monkeypatch.setattr(staging_module, "KEPT_MIB", 3.5 * layout.num_bytes / 2**20)
    staging, block = Staging([layout], torch.float32, CPU), Block([layout], torch.float32, CPU)
    for key in (1, 2, 3, 1, 4):
        staging.load(keyed(key, key), layout, block)
    for key in (1, 3, 4):
        staging.load(keyed(key, key, forgotten=True), layout, block)
    with pytest.raises(CapacityError):
        staging.load(keyed(2, 2, forgotten=True), layout, block)


# ------------------------------------------------------------------ pinned blocks take turns


class Event:
    """Stands for `torch.cuda.Event` and writes down what happens to it."""

    log: list[tuple[str, int]] = []  # noqa: RUF012
    made: list["Event"] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.number = len(Event.made)
        Event.made.append(self)

    def synchronize(self) -> None:
        Event.log.append(("wait", self.number))

    def record(self, stream: object = None) -> None:
        Event.log.append(("record", self.number))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    """A machine without CUDA that believes in pinned memory; as with CUDA, memory of no bytes is not pinned."""
    zeros = torch.zeros
    monkeypatch.setattr(Event, "log", [])
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, device=None: self.nbytes > 0)
    return Event


@pytest.mark.parametrize(
    "declarations", [DECLARATIONS, DECLARATIONS[:1]], ids=["metadata and pixels", "pixels without metadata"]
)
def test_a_pinned_block_is_not_written_before_its_last_copy_is_through(
    declarations: tuple[Declaration, ...], pinned: type[Event]
) -> None:
    layout = Layout(declarations, capacity_of(8, 8), padded=True)
    staging, block = Staging([layout], torch.float32, torch.device("cuda")), Block([layout], torch.float32, CPU)
    packed = Packed.empty(declarations)
    for _ in range(TURNS + 1):
        staging.load(packed, layout, block)
    turns = [*range(TURNS), 0]
    assert pinned.log == [event for turn in turns for event in (("wait", turn), ("record", turn))]
    assert staging.pinned_bytes() == TURNS * sum(tensor.nbytes for tensor in block.tensors())
