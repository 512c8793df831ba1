"""What caps and grids are worth, from made-up times whose answer is known."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay import EncoderCudaGraphConfig
from onereplay.bench.dispatch import half_octave_rule, one_replay_rule, power_of_two_rule
from onereplay.bench.grids import GRIDS, default_grid, steps_grid
from onereplay.bench.inputs import MIX_BATCHES, num_tokens, workload
from onereplay.bench.simulate import AGAINST, Batch, Demand, Study, batches_of, pipeline_ms, simulate
from onereplay.bench.study_page import study_page
from onereplay.encoder import planner
from onereplay.errors import ConfigError
from tests.bench.synthetic import QWEN, per_token, profile, times

sizes = st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=40), min_size=1, max_size=8)


def batches(*of_items: Sequence[int]) -> list[Batch]:
    return [[{"vision": tokens} for tokens in items] for items in of_items]


def launch_bound(tokens: int) -> float:
    """An eager forward that the host holds up below 3,000 tokens."""
    return max(30.0, per_token(tokens))


@pytest.fixture(scope="module")
def mix() -> Mapping[str, Sequence[Batch]]:
    """The first batches of mix-v1."""
    return {QWEN: batches_of(profile(), "mix-v1", 400)}


# ---------------------------------------------------------------------------------------------------------------------
# Times of the rules
# ---------------------------------------------------------------------------------------------------------------------


@given(sizes)
def test_where_a_row_costs_the_same_everywhere_times_are_rows(of_items: list[list[int]]) -> None:
    demand = Demand(profile(), batches(*of_items))
    for way, rule in (("half-octave", half_octave_rule), ("power-of-two", power_of_two_rule)):
        rows = [sum(part.budget or part.tokens for part in rule(items, 64)) for items in of_items]
        # the first value holds below 64 tokens; 1e-9 is the rounding of sums of doubles
        assert demand.earlier_ms[way] == pytest.approx([per_token(count) for count in rows], rel=1e-9)


@given(sizes, st.sampled_from([1024, 2560, 5120]))
def test_ours_is_the_librarys_rule(of_items: list[list[int]], cap: int) -> None:
    """Replays and eager forwards that cost differently, against `one_replay_rule`, which calls the library's `plan`."""
    demand = Demand(profile(eager=launch_bound), batches(*of_items))
    ours = demand.ours_ms({"vision": default_grid(cap)})
    parts = [one_replay_rule(items, 64, default_grid(cap))[0] for items in of_items]
    path = demand.profile.paths["vision"]
    expected = [path.eager_ms(part.tokens) if part.budget is None else per_token(part.budget) for part in parts]
    assert ours.milliseconds == pytest.approx(expected)
    assert ours.eager_share == pytest.approx(np.mean([part.budget is None for part in parts]))
    rows = sum(part.budget or 0 for part in parts)
    assert ours.padding_fraction == pytest.approx(sum(part.padding for part in parts) / rows if rows else 0)


def test_too_many_items_run_eagerly() -> None:
    demand = Demand(profile(eager=launch_bound), batches([8] * 65, [8] * 64))
    assert demand.ours_ms({"vision": (1024,)}).milliseconds == pytest.approx([30.0, per_token(1024)])


def test_paths_of_a_batch_add_up() -> None:
    """64 tokens of the global view and 200 of local tiles: replays of 64 and of 256 rows, whatever the other path."""
    two = profile(paths={"global": times(unit=64), "local": times(unit=100)})
    demand = Demand(two, [[{"global": 64, "local": 200}], [{"global": 64}]])
    ours = demand.ours_ms({"global": (64, 128), "local": (300,)})
    assert ours.milliseconds == pytest.approx([per_token(64 + 300), per_token(64)])


def test_a_replay_waits_for_the_one_before_and_for_the_host() -> None:
    assert pipeline_ms([(10.0, 1.0)]) == 10
    assert pipeline_ms([(10.0, 1.0), (20.0, 1.0)]) == 1 + 9 + 19, "the host prepares the second meanwhile"
    assert pipeline_ms([(1.0, 1.0)] * 3) == 3, "the host is what takes time"
    assert pipeline_ms([]) == 0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10)), min_size=1, max_size=8))
def test_several_replays_take_no_longer_than_one_by_one(parts: list[tuple[float, float]]) -> None:
    together = pipeline_ms(parts)
    assert together <= sum(alone for alone, _ in parts) + 1e-9
    assert together >= max(alone for alone, _ in parts) - 1e-9


# ---------------------------------------------------------------------------------------------------------------------
# Caps and grids
# ---------------------------------------------------------------------------------------------------------------------

ON_THE_LADDER = (1024, 1536, 2560, 3072, 5120, 16_384)


def by_cap(study: Study, grid: str) -> dict[int, float]:
    return {outcome.cap: outcome.against().geomean for outcome in study.outcomes if outcome.grid == grid}


def test_where_launching_is_free_the_smallest_cap_is_the_fastest(mix: Mapping[str, Sequence[Batch]]) -> None:
    """An eager forward then has no drawback, and a replay its padding. Caps are levels, so a higher one adds levels."""
    found = list(by_cap(simulate([profile()], caps=ON_THE_LADDER, batches=mix), "36").values())
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_where_launching_is_all_that_costs_the_largest_cap_is_the_fastest(mix: Mapping[str, Sequence[Batch]]) -> None:
    found = by_cap(simulate([profile(eager=lambda _: 1000.0)], caps=ON_THE_LADDER, batches=mix), "36")
    assert list(found.values()) == sorted(found.values())


def test_finer_steps_are_never_slower(mix: Mapping[str, Sequence[Batch]]) -> None:
    """Up to the cap, where a replay costs more the larger it is."""
    demand = Demand(profile(eager=launch_bound), mix[QWEN])
    coarse, fine = (demand.ours_ms({"vision": grid(5120, 1)}) for grid in (default_grid, steps_grid))
    assert (fine.milliseconds <= coarse.milliseconds).all()
    assert fine.padding_fraction < coarse.padding_fraction
    assert fine.eager_share == coarse.eager_share


def test_the_recommended_cap_is_the_smallest_without_a_slower_batch(mix: Mapping[str, Sequence[Batch]]) -> None:
    """Launch bound below 3,000 tokens: caps far below leave batches that eager forwards make slower; steps of 128 leave
    none above 2,560. A fixed cost of a replay takes the earlier rule's small splits away."""

    def replay(tokens: int) -> float:
        return 1.0 + per_token(tokens)

    study = simulate([profile(replay, launch_bound)], batches=mix)
    chosen = study.recommended["49"]
    assert chosen is not None
    assert chosen > 1024
    for outcome in study.overall:
        if outcome.grid == "49" and outcome.cap <= chosen:
            assert (outcome.against().slower_share == 0) == (outcome.cap == chosen)


def test_there_is_no_recommendation_where_every_cap_slows_some_batch(mix: Mapping[str, Sequence[Batch]]) -> None:
    study = simulate([profile(eager=lambda _: 1000.0)], caps=[1024, 2048], batches=mix)
    assert study.recommended == {"36": None, "49": None}
    shares = {outcome.cap: outcome.against().slower_share for outcome in study.overall if outcome.grid == "36"}
    assert shares[2048] < shares[1024]
    assert f"the fewest are {shares[2048]:.2%}, at 2,048" in study_page(study)


def test_a_batch_counts_as_slower_from_2_percent_on() -> None:
    """1,024 tokens are 10.24 ms by the earlier rule; ours is eager here, and 1 % or 3 % slower."""
    for factor, share in ((1.01, 0.0), (1.03, 1.0)):
        made = profile(eager=lambda tokens, factor=factor: factor * per_token(tokens))  # type: ignore[misc]
        study = simulate([made], budgets=[64], grids=[], batches={QWEN: batches([1024])})
        (outcome,) = study.outcomes
        assert outcome.against().slower_share == share
        assert outcome.against().worst == pytest.approx(1 / factor)
        assert outcome.worst_tokens == 1024


def test_a_list_of_ones_own_is_a_grid_with_its_largest_as_cap(mix: Mapping[str, Sequence[Batch]]) -> None:
    study = simulate([profile()], caps=[1024], budgets=[512, 256, 4096, 512], batches=mix)
    own = study.overall[-1]
    assert (own.grid, own.cap, own.levels) == ("own", 4096, 3)
    assert list(study.recommended) == [*GRIDS, "own"]


def test_models_count_alike_and_memory_adds_up(mix: Mapping[str, Sequence[Batch]]) -> None:
    fast, slow = profile(), profile(eager=launch_bound, model="preset:qwen2_5_vl-3b")
    study = simulate([fast, slow], caps=[1024], grids=["36"], batches={each.model: mix[QWEN] for each in (fast, slow)})
    one, two = study.outcomes
    (both,) = study.overall
    assert both.against().geomean == pytest.approx(math.sqrt(one.against().geomean * two.against().geomean))
    assert both.against().worst == min(one.against().worst, two.against().worst)
    assert both.graph_mib == one.graph_mib + two.graph_mib
    assert study.batches == 2 * len(mix[QWEN])


# ---------------------------------------------------------------------------------------------------------------------
# Workloads and errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [QWEN, "preset:internvl3-8b", "preset:lfm2_vl-1.6b", "preset:deepseek_ocr"])
@pytest.mark.parametrize("name", ["mix-v1", "cases"])
def test_batches_ask_for_the_tokens_of_the_benchmarks_shapes(model: str, name: str) -> None:
    adapter = planner(model, EncoderCudaGraphConfig())[0].adapter
    shapes = workload(name, adapter, (), 50)
    found = batches_of(profile(model=model), name, 50)
    assert [sum(sum(item.values()) for item in batch) for batch in found] == [num_tokens(adapter, s) for s in shapes]
    assert [len(batch) for batch in found] == [len(shape.items) for shape in shapes]


def test_the_mix_is_that_of_the_benchmark() -> None:
    assert len(batches_of(profile(), "mix-v1")) < MIX_BATCHES
    assert simulate([profile()], caps=[1024], grids=["36"], limit=7).batches == 7


def test_times_beyond_a_profile_are_noted(mix: Mapping[str, Sequence[Batch]]) -> None:
    whole = profile()
    assert simulate([whole], caps=[1024], batches=mix).notes == ()
    path = whole.paths["vision"]
    short = profile(paths={"vision": type(path)(1, tuple(p for p in path.points if p.tokens <= 5120))})
    study = simulate([short], batches=mix)
    assert max(outcome.cap for outcome in study.outcomes) == 5120, "no cap by default that was not measured"
    assert "measured up to 5,120" in study.notes[0]
    with pytest.raises(ConfigError, match="cap=8192 is above 5,120"):
        simulate([short], caps=[8192], batches=mix)


def test_a_cap_above_what_a_model_takes_is_the_models_own(mix: Mapping[str, Sequence[Batch]]) -> None:
    made = profile(max_batch_tokens=2048)
    low, high = simulate([made], caps=[2048, 16_384], grids=["36"], batches=mix).outcomes
    assert (low.levels, low.graph_mib, low.versus) == (high.levels, high.graph_mib, high.versus)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="no profile is given"):
        simulate([])
    with pytest.raises(ConfigError, match="has two profiles"):
        simulate([profile(), profile()])
    with pytest.raises(ConfigError, match="grid='50' is unknown; use 36, 49"):
        simulate([profile()], grids=["50"])
    with pytest.raises(ConfigError, match="workload='single' is unknown"):
        simulate([profile()], name="single")
    with pytest.raises(ConfigError, match="has no batch for preset:internvl3-8b"):
        simulate([profile(model="preset:internvl3-8b")], name="videos")


def test_the_page_has_a_row_a_grid_and_cap(mix: Mapping[str, Sequence[Batch]]) -> None:
    page = study_page(simulate([profile()], caps=[1024, 5120], batches=mix, command="the command"))
    assert "`the command`" in page
    assert page.count("| 36 | 5,120 | 36 |") == page.count("| 49 | 5,120 | 49 |") == 1
    assert f"the {AGAINST} rule" in page
