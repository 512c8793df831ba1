"""`DataParallelEncoder` over gloo in 2, 3 and 4 processes gives what one process gives, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from onereplay import DataParallelEncoder
from onereplay.encoder import Encoder
from onereplay.errors import OnereplayError
from onereplay.geometry import Grid
from onereplay.parallel import spread
from tests.parallel.workers import Seen, images, inputs, run, subgroup_worker, tiny

QWEN = {
    "images and a video": [Grid(1, 8, 8), Grid(1, 4, 6), Grid(3, 4, 4), Grid(1, 16, 16), Grid(1, 2, 2)],
    "one item: the other ranks are empty": [Grid(1, 8, 8)],
    "an item over the cap among others": [Grid(1, 4, 4), Grid(1, 48, 48), Grid(1, 6, 8)],
    "many equal items": [Grid(1, 4, 4)] * 11,
}
TILES = {"three images of three, one and one tiles": [Grid(1, 1, 1)] * 5, "one tile": [Grid(1, 1, 1)]}
PATHS = {
    "with and without local tiles": [Grid(1, 2, 2), Grid(1, 0, 0), Grid(1, 1, 2)],
    "one image: the other rank is empty": [Grid(1, 2, 1)],
}
CROPS = {"images of other crops": [Grid(1, 1, 1), Grid(1, 2, 1), Grid(1, 1, 3)], "one image": [Grid(1, 1, 2)]}
SPANS = {"images of other sizes": [Grid(1, 6, 9), Grid(1, 3, 3), Grid(1, 12, 6)], "one image": [Grid(1, 6, 6)]}
CASES = {
    "qwen2_5_vl-7b@tiny": QWEN,
    "internvl3-1b@tiny": TILES,
    "deepseek_ocr@tiny": PATHS,
    "deepseek_vl2-tiny@tiny": CROPS,
    "deepseek_v41-flash@tiny": SPANS,
}
OTHERS = sorted(set(CASES) - {"qwen2_5_vl-7b@tiny"})


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What the ranks of one group saw with Qwen2.5-VL."""
    return seen_by(request.param, "qwen2_5_vl-7b@tiny", tmp_path_factory.mktemp("ranks"))


def seen_by(num_ranks: int, spec: str, folder: Path) -> list[Seen]:
    ranks = run(folder, num_ranks, spec, CASES[spec])
    assert not [seen["crash"] for seen in ranks if "crash" in seen]
    return ranks


@pytest.fixture(scope="module")
def single() -> Encoder:
    """The same model in this process alone."""
    return tiny("qwen2_5_vl-7b@tiny")


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_every_rank_gets_the_single_process_result_bit_for_bit(ranks: list[Seen], single: Encoder) -> None:
    for name, grids in QWEN.items():
        expected = single.encode_inputs(**inputs(single, grids))
        assert all(same(seen[name], expected) for seen in ranks), name


def test_no_items_are_an_empty_list_on_every_rank(ranks: list[Seen]) -> None:
    assert all(seen["no items"] == [] for seen in ranks)


def test_a_rank_that_fails_fails_the_call_everywhere_with_its_number_and_message(ranks: list[Seen]) -> None:
    for rank, seen in enumerate(ranks):
        own = "OutOfMemoryError: no memory on this rank"
        assert seen["rank 1 fails"] == (own if rank == 1 else f"RankError: rank 1 failed: {own}")


def test_different_batches_on_the_ranks_are_refused_on_all(ranks: list[Seen]) -> None:
    assert all("RankError: the ranks were given different batches" in seen["different batches"] for seen in ranks)


def test_bad_input_on_one_rank_is_its_own_error_there_and_named_elsewhere(ranks: list[Seen]) -> None:
    own, *others = (seen["rank 0 is given a bad name"] for seen in ranks)
    assert own.startswith("InputError: qwen2_5_vl does not take image_embeds")
    assert all(other == f"RankError: rank 0 failed: {own}" for other in others)


def test_after_failures_the_next_call_is_right(ranks: list[Seen]) -> None:
    first = next(iter(QWEN))
    assert all(same(seen["again"], seen[first]) for seen in ranks)


def test_a_rank_runs_its_share_alone_by_the_one_replay_rule(ranks: list[Seen]) -> None:
    """An item over the cap is one eager forward on one rank and on no other."""
    assert sum(sum(seen["report"].eager["vision"].values()) for seen in ranks) == 1


def test_photos_are_decoded_by_the_rank_that_encodes_them(ranks: list[Seen], single: Encoder) -> None:
    expected = single.encode(images(5))
    assert all(same(seen["features"], expected) for seen in ranks)
    assert sum(seen["decoded"] for seen in ranks) == 5
    assert all("no such file.png" in seen["missing"] for seen in ranks)


@pytest.mark.parametrize("spec", OTHERS)
def test_tiles_paths_and_assembled_items_are_spread_like_any_other(spec: str, tmp_path: Path) -> None:
    single = tiny(spec)
    ranks = seen_by(2, spec, tmp_path)
    for name, grids in CASES[spec].items():
        expected = single.encode_inputs(**inputs(single, grids))
        assert all(same(seen[name], expected) for seen in ranks), name


def test_a_group_of_some_ranks_makes_its_host_group_without_the_others(tmp_path: Path) -> None:
    """A rank outside the group never comes to make one; waiting for it would hang."""
    spec, grids = "internvl3-1b@tiny", TILES["three images of three, one and one tiles"]
    single = tiny(spec)
    spawn(subgroup_worker, args=(str(tmp_path), spec, grids), nprocs=3)
    for rank in range(2):
        assert same(torch.load(tmp_path / f"{rank}.pt"), single.encode_inputs(**inputs(single, grids)))


def test_without_a_process_group_it_says_what_to_call(single: Encoder) -> None:
    with pytest.raises(OnereplayError, match="init_process_group"):
        DataParallelEncoder(single)


def test_selecting_items_takes_their_grids_and_rows(single: Encoder) -> None:
    batch = single.adapter.batch(**inputs(single, QWEN["images and a video"]))
    whole = single.manager.encode(batch)
    for chosen in ([4, 0], [2], [1, 3], []):
        part = single.adapter.select(batch, chosen)
        assert same(single.manager.encode(part), [whole[place] for place in chosen])


def test_shares_follow_from_sizes_alone() -> None:
    assert spread([64, 24, 48, 256, 4], 2) == [[3], [0, 1, 2, 4]]
