"""Pixels that the caller writes into the static buffer itself: not copied, never stale, never another batch's.

A result is compared bit for bit with that of the same pixels from a tensor of the caller's own: the same trace runs on
the same numbers.
"""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.errors import CapacityError, ClosedError, InputError
from tests.core.dummy import MERGE, WIDTH, DummyAdapter, DummyBatch, Picture, batch_of, picture
from tests.core.test_staging import Writes

Manager = EncoderCudaGraphManager[DummyBatch]


@pytest.fixture
def manager() -> Manager:
    """Holds 8 tokens, 16 patches, and at most 4 items."""
    options = EncoderCudaGraphConfig(token_budgets=(4, 8), max_items_per_batch=4, backend="traced")
    made: Manager = EncoderCudaGraphManager(DummyAdapter(), options)
    made.capture()
    return made


def pixels(seed: int, rows: int = 10) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def batch(*sequences: Tensor) -> DummyBatch:
    """One picture, a sequence each."""
    return batch_of(Picture({"main": sequences}))


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_pixels_in_the_staging_area_are_not_copied_and_give_what_their_copy_gives(manager: Manager) -> None:
    expected = manager.encode(batch(pixels(1)))
    manager.encode(batch(pixels(2)))
    static = manager._paths["main"].block.staged["pixels"]
    with manager.staging_area(10) as area:
        assert manager.owns(area)
        assert (area.shape, area.dtype) == ((10, WIDTH), torch.float32)
        area.copy_(pixels(1))
        with Writes(pixels=static) as writes:
            found = manager.encode(batch(area))
        again = manager.encode(batch(area))
    assert not writes.written
    assert_same(found, expected)
    assert_same(again, expected)
    assert manager.report().replays == {"main": {8: 4}}


def test_a_graph_that_is_recorded_for_the_batch_leaves_the_area_as_it_was_written() -> None:
    lazy: Manager = EncoderCudaGraphManager(DummyAdapter(), EncoderCudaGraphConfig(token_budgets=(8,), backend="auto"))
    lazy.capture()
    with lazy.staging_area(10) as area:
        area.copy_(pixels(1))
        found = lazy.encode(batch(area))
    assert_same(found, lazy.encode(batch(pixels(1))))
    assert lazy.report().replays == {"main": {8: 2}}


def test_parts_in_order_and_without_gaps_are_not_copied(manager: Manager) -> None:
    expected = manager.encode(batch(*pixels(1).split([4, 6])))
    static = manager._paths["main"].block.staged["pixels"]
    with manager.staging_area(12) as area:
        area[:10] = pixels(1)
        with Writes(pixels=static) as writes:
            found = manager.encode(batch(area[:4], area[4:10]))
    assert not writes.written
    assert_same(found, expected)


@pytest.mark.parametrize(
    "places", [[(4, 10), (0, 4)], [(0, 4), (6, 12)], [(2, 8), (8, 12)], [(2, 12)]], ids=["order", "gap", "start", "one"]
)
def test_parts_in_another_order_or_with_gaps_are_refused(manager: Manager, places: list[tuple[int, int]]) -> None:
    with manager.staging_area(12) as area:
        with pytest.raises(InputError, match="not as whole rows from its start, in order and without gaps"):
            manager.encode(batch(*(area[slice(*place)] for place in places)))
        with pytest.raises(InputError, match="without gaps"):
            manager.encode(batch(area[:4], pixels(1)))
        area.copy_(pixels(1, 12))
        found = manager.encode(batch(area))
    assert_same(found, manager.encode(batch(pixels(1, 12))))


def test_after_its_block_the_area_is_refused(manager: Manager) -> None:
    with manager.staging_area(10) as area:
        area.copy_(pixels(1))
    for late in (batch(area), batch_of(*(Picture({"main": (part,)}) for part in area.split(2)))):
        with pytest.raises(InputError, match="'pixels' lies in the encoder's own buffer"):
            manager.encode(late)
    assert manager.report().batches == 0
    manager.encode(batch(pixels(1)))


def test_an_area_that_another_batch_took_is_refused(manager: Manager) -> None:
    with manager.staging_area(10) as area:
        area.copy_(pixels(1))
        manager.encode(batch(pixels(2)))
        with pytest.raises(InputError, match="give a tensor of your own"):
            manager.encode(batch(area))


def test_an_eager_batch_takes_its_pixels_from_the_area_too(manager: Manager) -> None:
    """Five items where a graph holds four."""
    items = [Picture({"main": (part,)}) for part in pixels(1).split(2)]
    expected = manager.encode(batch_of(*items))
    with manager.staging_area(10) as area:
        area.copy_(pixels(1))
        assert_same(manager.encode(batch_of(*(Picture({"main": (part,)}) for part in area.split(2)))), expected)
    assert manager.report().eager == {"main": {"too many items": 2}}


def test_other_threads_wait_until_the_block_ends(manager: Manager) -> None:
    expected = manager.encode(batch(pixels(1)))
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        started.set()
        manager.encode(batch(pixels(2)))
        done.set()

    thread = threading.Thread(target=other)
    with manager.staging_area(10) as area:
        thread.start()
        started.wait()
        area.copy_(pixels(1))
        assert not done.wait(0.05)
        assert_same(manager.encode(batch(area)), expected)
    thread.join()
    assert done.is_set()


def test_an_error_in_the_block_leaves_the_manager_usable(manager: Manager) -> None:
    expected = manager.encode(batch(pixels(1)))

    def fail() -> None:
        with manager.staging_area(10) as area:
            area.fill_(torch.nan)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_same(manager.encode(batch(pixels(1))), expected)


def test_what_is_written_brings_no_gradients_into_the_static_buffer(manager: Manager) -> None:
    with torch.enable_grad(), manager.staging_area(10) as area:
        area.copy_(pixels(1).requires_grad_())
        (found,) = manager.encode(batch(area))
    assert not found.requires_grad
    assert not manager._paths["main"].block.staged["pixels"].requires_grad


@pytest.mark.parametrize("rows", [0, -1, 8 * MERGE + 1])
def test_more_rows_than_a_graph_has_are_refused_with_their_number(manager: Manager, rows: int) -> None:
    refused = rf"rows={rows}: the captured graphs of path 'main' have a buffer 'pixels' of {8 * MERGE} rows"
    with pytest.raises(CapacityError, match=refused), manager.staging_area(rows):
        pass


def test_without_a_graph_a_path_or_a_buffer_of_that_name_there_is_no_area(manager: Manager) -> None:
    for given in ({"path": "local"}, {"name": "tiles"}):
        with pytest.raises(CapacityError, match="of 0 rows"), manager.staging_area(2, **given):
            pass
    fresh: Manager = EncoderCudaGraphManager(DummyAdapter())
    with pytest.raises(CapacityError, match="of 0 rows"), fresh.staging_area(2):
        pass


def test_a_closed_manager_lends_nothing(manager: Manager) -> None:
    manager.close()
    with pytest.raises(ClosedError), manager.staging_area(2):
        pass


def test_each_path_of_a_batch_may_have_an_area() -> None:
    options = EncoderCudaGraphConfig(token_budgets=(8,), backend="traced")
    two: Manager = EncoderCudaGraphManager(DummyAdapter(names=("global", "local")), options)
    two.capture()
    sequences = {"global": (pixels(1),), "local": (pixels(2),)}
    expected = two.encode(batch_of(Picture(sequences)))
    two.encode(batch_of(picture(torch.Generator(), 3, path="global"), picture(torch.Generator(), 3, path="local")))
    with two.staging_area(10, "global") as first, two.staging_area(10, "local") as second:
        first.copy_(pixels(1))
        second.copy_(pixels(2))
        assert_same(two.encode(batch_of(Picture({"global": (first,), "local": (second,)}))), expected)
