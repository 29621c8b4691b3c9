"""The forecast's simulation: the loader's own packs, hand-computed waiting, rows as training draws them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import NUM_SAMPLES, PROFILE, SETTINGS, opened, write_stream

from indexer.exclusion import ExclusionList, Exclusions
from indexer.rows import id_hashes
from indexer.splits import held_out
from indexer.table import IndexTable, open_index
from packer.format.errors import UsageError
from plugin import carry_over, task_encoder
from plugin.balance import Mode
from plugin.cost import cost_model
from plugin.cost.index import sample_costs
from plugin.forecast import (
    BalanceForecast,
    Cluster,
    Estimate,
    PackPool,
    RowColumns,
    RowOrder,
    SourceRows,
    SourceWeight,
    balance,
    pack_pool,
    pack_size,
    packs_of_stream,
    read_rows,
)
from plugin.forecast import rows as reading
from plugin.forecast.batches import drawn
from plugin.forecast.pool import Packs
from plugin.packing import PackLimits
from plugin.settings import PackSettings, Peers

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")

MODEL = cost_model("qwen2_5_vl_vit+qwen3_8b")
SOURCES = [SourceWeight(name=name, weight=1.0, val=0.0) for name in NUM_SAMPLES]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("forecast") / "job")


@pytest.fixture(scope="module")
def table(url: str) -> IndexTable:
    return open_index(url, PROFILE)


def columns_of(table: IndexTable) -> RowColumns:
    """All rows in the order of the table."""
    names = ("num_tokens", "num_images", "num_patches")
    counts = {name: table.column(name).to_numpy().astype(np.int64) for name in names}
    costs = np.concatenate([sample_costs(MODEL, batch) for batch in table.batches()])
    return RowColumns(**counts, encoder_cost=costs[:, 0], llm_cost=costs[:, 1])


def test_packs_are_those_of_the_loader_one_by_one(url: str, table: IndexTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that Energon draws, watched as they come; the forecast makes of them the packs that the loader hands out."""
    came: list[int] = []
    seeds: list[tuple[int, int]] = []

    class Watched(carry_over.Buffer):
        def append(self, sample: Any) -> Any:
            came.append(table.rows_of_source(sample.row.source).start + sample.number)
            return super().append(sample)

    def watched(packs: Any, *, worker_seed: int, sample_index: int) -> Any:
        seeds.append((worker_seed, sample_index))
        return shuffled(packs, worker_seed=worker_seed, sample_index=sample_index)

    shuffled = task_encoder.shuffled
    monkeypatch.setattr(carry_over, "Buffer", Watched)
    monkeypatch.setattr(task_encoder, "shuffled", watched)
    with opened(url, shuffle_buffer_size=None) as loader:
        packs = [pack.batch for _, pack in zip(range(60), loader, strict=False)]
    order = came[::2]  # each comes to the buffer that mixes, of one, and then to the one that waits
    assert order == came[1::2]
    assert [index for _, index in seeds] == list(range(len(seeds)))

    left = iter(order)
    columns, limits = columns_of(table), SETTINGS.limits(Peers())
    plans = packs_of_stream(
        columns,
        lambda number: np.array([row for _, row in zip(range(number), left, strict=False)], np.int64),
        limits,
        buffer_size=SETTINGS.buffer_size,
        max_age=SETTINGS.max_age,
        worker_seed=seeds[0][0],
    )
    found = [pack.tolist() for plan in plans for pack in plan]
    starts = [{name: table.rows_of_source(name).start for name in pack.sources} for pack in packs]
    rows = [
        [starts[place][pack.sources[source]] + row for source, row in zip(pack.sample_source, pack.sample_row, strict=True)]
        for place, pack in enumerate(packs)
    ]
    assert len(found) >= 50
    assert found[:50] == rows[:50]

    size = pack_size("qwen2_5_vl", {})
    assert size is not None
    sums = [[int(column[pack].sum()) for pack in rows] for column in (columns.num_images, columns.num_patches)]
    expected = size.num_bytes(limits.sequence_length, np.array([len(pack) for pack in rows]), *map(np.array, sums))
    # Only the texts of ids and sources differ, within the multiples of 64 that each field takes.
    assert all(abs(pack.buffer.nbytes - number) <= 512 for pack, number in zip(packs, expected.tolist(), strict=True))
    assert max(expected) > 100_000


def hand_made(encoder: Sequence[Sequence[int]], llm: Sequence[int] | None = None, num_bytes: int = 100) -> PackPool:
    """A pool of one replicate a row, with those costs."""
    replicates = []
    for row in encoder:
        ones = np.ones(len(row), np.int64)
        costs = ones * 0 if llm is None else np.array(llm, np.int64)
        replicates.append(
            Packs(
                num_tokens=ones * 10,
                padded_tokens=ones * 10,
                num_samples=ones,
                num_images=ones,
                num_patches=ones,
                encoder_cost=np.array(row, np.int64),
                llm_cost=costs,
                num_bytes=ones * num_bytes,
            )
        )
    return PackPool(
        limits=PackLimits(sequence_length=10),
        replicates=replicates,
        fewest=[len(row) for row in encoder],
        num_streams=1,
        num_drawn_rows=0,
    )


CLUSTERS = [{"expert_parallel": 2}, {"synchronises": "microbatch"}, {}]


@pytest.mark.parametrize("meeting", CLUSTERS)
def test_equal_packs_wait_for_nothing_and_gain_nothing(meeting: dict[str, Any]) -> None:
    found = balance(hand_made([[7] * 16] * 3, [5] * 16), Cluster(num_ranks=4, **meeting), 4)
    nothing, one = Estimate(value=0.0, error=0.0), Estimate(value=1.0, error=0.0)
    assert found.arrival == found.bound == one
    assert not found.is_sampled
    for mode in found.modes:
        assert (mode.imbalance, mode.gain, mode.moved_share, mode.off_node_share, mode.moved_bytes) == (one, *[nothing] * 4)


def by_mode(found: BalanceForecast) -> dict[str, tuple[float, float]]:
    return {str(mode.mode): (mode.imbalance.value, mode.gain.value) for mode in found.modes}


def test_two_ranks_by_hand() -> None:
    """Rank 0 has packs of 8 and 0, rank 1 of 0 and 8: met at each microbatch they take 16 for a mean work of 8."""
    pool = hand_made([[8, 0, 0, 8], [8, 0, 0, 8]])
    fsdp = balance(pool, Cluster(num_ranks=2, synchronises="microbatch"), 2)
    assert (fsdp.arrival.value, fsdp.bound.value) == (2.0, 1.0)
    assert by_mode(fsdp) == {"local": (1.0, 1.0), "fsdp": (1.0, 1.0)}
    assert [mode.is_auto for mode in fsdp.modes] == [False, True]
    batch = balance(pool, Cluster(num_ranks=2), 2)
    assert batch.arrival.value == 1.0
    assert by_mode(batch) == {"dp": (1.0, 0.0)}


def test_two_ranks_of_unequal_work_by_hand() -> None:
    """8, 8, 0 against 0, 0, 0: only moving a pack helps, one each way, between machines if each has one rank."""
    pool = hand_made([[8, 8, 0, 0, 0, 0]])
    found = balance(pool, Cluster(num_ranks=2, synchronises="microbatch", ranks_per_node=1), 3)
    local, fsdp = found.modes
    assert found.arrival == Estimate(value=2.0, error=None)
    assert (local.gain.value, local.moved_share.value) == (0.0, 0.0)
    # The two dear packs in one microbatch: 8 for a mean work of 8.
    assert (fsdp.imbalance.value, fsdp.gain.value, found.bound.value) == (1.0, 1.0, 1.0)
    assert fsdp.moved_share.value == fsdp.off_node_share.value == pytest.approx(2 / 6)
    assert fsdp.moved_bytes == fsdp.off_node_bytes == Estimate(value=200.0, error=None)


def test_the_standard_error_is_that_of_independent_batches() -> None:
    """Ratios 2 and 1 in two replicates: mean 1.5, standard deviation 0.707, over the root of 2."""
    found = balance(hand_made([[8, 0, 0, 8], [4, 4, 4, 4]]), Cluster(num_ranks=2, synchronises="microbatch"), 2)
    assert (found.arrival.value, found.arrival.error) == (1.5, pytest.approx(0.5))


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_ranks_get_runs_of_packs_and_share_none_while_there_are_enough(size: int, ranks: int, number: int, seed: int) -> None:
    chosen = drawn(hand_made([[0] * size]).replicates[0], ranks, number, np.random.default_rng(seed))
    assert chosen.shape == (ranks, number)
    assert ((np.diff(chosen, axis=1) - 1) % size == 0).all()
    if size >= ranks * number:
        assert len(np.unique(chosen)) == chosen.size


def test_modes_are_those_of_the_topology() -> None:
    pool = hand_made([list(range(16))])
    assert [mode.mode for mode in balance(pool, Cluster(num_ranks=4, expert_parallel=2), 4).modes] == ["local", "ep", "fsdp"]
    # One group of all ranks is as if all met; groups of one meet nobody.
    assert [mode.mode for mode in balance(pool, Cluster(num_ranks=4, expert_parallel=4), 4).modes] == ["local", Mode.FSDP]
    assert [mode.mode for mode in balance(pool, Cluster(num_ranks=4, expert_parallel=1), 4).modes] == ["dp"]
    with pytest.raises(UsageError, match="found 6 data-parallel ranks with expert parallel 4, expected a divisor of 6"):
        Cluster(num_ranks=6, expert_parallel=4)


def test_rows_are_those_that_training_draws(table: IndexTable) -> None:
    whole = columns_of(table)
    found = read_rows(table, SOURCES, MODEL)
    assert {source.name: (source.num_read, source.num_train, source.is_whole) for source in found} == {
        name: (number, number, True) for name, number in NUM_SAMPLES.items()
    }
    for source in found:
        own = table.rows_of_source(source.name)
        together = RowColumns.concatenated(source.slices)
        for name in RowColumns.__slots__:
            assert (getattr(together, name) == getattr(whole, name)[own.start : own.stop]).all(), name


def test_held_out_and_excluded_rows_are_left_out(url: str) -> None:
    table = open_index(url, PROFILE)
    ids = [f"pic {number}" for number in range(0, NUM_SAMPLES["pics"], 3)]
    hashes = np.sort(id_hashes(ids))
    table.exclude(Exclusions(lists=[ExclusionList(name="a", ids=ids, hashes=hashes, sources=None)], fingerprint=""))
    (found,) = read_rows(table, [SourceWeight(name="pics", weight=1.0, val=0.5)], MODEL)
    own = table.rows_of_source("pics")
    kept = ~held_out(table.column("id_hash").to_numpy(), 0.5)[own.start : own.stop]
    kept[[row - own.start for row in table.exclusion.rows]] = False  # type: ignore[union-attr]
    assert 10 < kept.sum() < 40
    assert (RowColumns.concatenated(found.slices).num_tokens == columns_of(table).num_tokens[own.start : own.stop][kept]).all()


def test_of_a_large_source_slices_are_read(table: IndexTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_ROWS", 16)
    monkeypatch.setattr(reading, "SLICE_ROWS", 8)
    found = read_rows(table, SOURCES, MODEL, max_rows=90)
    whole = columns_of(table).num_tokens
    for source in found:
        assert (source.num_read, source.num_train) == (32, NUM_SAMPLES[source.name])
        assert not source.is_whole
        own = whole[table.rows_of_source(source.name).start :]
        assert all(
            any((piece.num_tokens == own[at : at + 8]).all() for at in range(0, source.num_rows, 8)) for piece in source.slices
        )
    again = read_rows(table, SOURCES, MODEL, max_rows=90)
    other = read_rows(table, SOURCES, MODEL, max_rows=90, seed=1)
    assert tokens(again) == tokens(found) != tokens(other)
    # Replicates have slices of their own then, and a packed sample comes from one of them.
    pool = pack_pool(found, PackSettings(sequence_length=256, buffer_size=30), num_packs=20, num_replicates=2, num_streams=2)
    assert len(pool) >= 40
    assert pool.most("num_tokens") <= 256


def tokens(sources: Sequence[SourceRows]) -> list[list[int]]:
    return [RowColumns.concatenated(source.slices).num_tokens.tolist() for source in sources]


def test_a_blend_draws_sources_by_weight_and_repeats_them_in_epochs() -> None:
    order = RowOrder([np.arange(3), np.arange(3, 1003)], [1, 3], np.random.default_rng(0))
    rows = np.concatenate([order.draw(number) for number in (1, 799, 3200)])
    few = rows[rows < 3]
    assert abs(len(few) - 1000) < 100
    assert all(len(set(few[at : at + 3])) == 3 for at in range(0, len(few) - 3, 3)), "each once an epoch"
    many = rows[rows >= 3]
    assert len(set(many[:1000])) == 1000
    assert order.num_drawn == 4000


def test_a_pool_says_how_full_packs_are(table: IndexTable) -> None:
    """Against a recount over packs of the same stream; the bound is never beaten."""
    settings = PackSettings(sequence_length=256, buffer_size=200, alignment=16)
    pool = pack_pool(read_rows(table, SOURCES, MODEL), settings, num_packs=100, num_replicates=3, num_streams=1, seed=3)
    for packs in pool.replicates:
        assert (packs.padded_tokens <= 256).all()
        assert (packs.padded_tokens % 16 == 0).all()
    full = [packs.num_tokens.sum() / 256 / len(packs) for packs in pool.replicates]
    assert pool.efficiency.value == pytest.approx(np.mean(full))
    assert pool.efficiency.value <= pool.bound.value <= 1
    assert 0.01 < pool.alignment_loss.value < 0.2
    assert pool.efficiency.value + pool.alignment_loss.value <= 1
    assert pool.efficiency.error is not None


def test_hardly_any_sample_that_fits_ends_in_one_message() -> None:
    long = RowColumns(**{name: np.full(50, 999) for name in RowColumns.__slots__})
    source = SourceRows(name="long", weight=1, num_rows=50, num_read=50, slices=[long])
    with pytest.raises(UsageError, match=r"found no pack in [\d,]+ samples: hardly any fits"):
        pack_pool([source], PackSettings(sequence_length=10, buffer_size=10), num_packs=4, num_replicates=1, num_streams=1)
    with pytest.raises(UsageError, match="found no sample to train on"):
        pack_pool(
            [SourceRows(name="none", weight=1, num_rows=0, num_read=0, slices=[])],
            PackSettings(sequence_length=10),
            num_packs=4,
            num_replicates=1,
            num_streams=1,
        )


def test_forms_of_packs_follow_the_image_rule() -> None:
    one = np.array([1])
    sizes = {}
    for rule, patches in (("qwen2_5_vl", 4), ("qwen3_vl", 4), ("internvl3", 1024), ("pixtral_hf", 4), (None, 0)):
        size = pack_size(rule, {})
        assert size is not None
        without, with_image = (size.num_bytes(1024, one, one * 1, one * number)[0] for number in (0, patches))
        sizes[rule] = int(with_image - without)
    pixels = {"qwen2_5_vl": 4 * 588, "qwen3_vl": 4 * 768, "internvl3": 3 * 448**2, "pixtral_hf": 4 * 768, None: 0}
    assert all(0 <= sizes[rule] - number < 64 or number == 0 for rule, number in pixels.items()), sizes


def test_nothing_here_loads_torch_or_energon() -> None:
    import subprocess
    import sys

    code = "import sys, plugin.forecast; print([name for name in ('torch', 'megatron', 'ray') if name in sys.modules])"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_drawn_samples_wait_as_packs_dealt_from_one_long_stream_do() -> None:
    """Of a web-like mix: `drawn_packs.dealt` packs and deals by other code; both see the same waiting and the same gain."""
    from drawn_packs import MIXES, dealt, draw

    from plugin.balance import assign, measure
    from plugin.balance.costs import checked_costs

    made = draw(MIXES["web"], 40_000, seed=1)
    counts = {name: getattr(made.samples, name) for name in ("num_tokens", "num_images", "num_patches")}
    columns = RowColumns(**counts, encoder_cost=made.encoder, llm_cost=made.llm)
    source = SourceRows(name="web", weight=1, num_rows=40_000, num_read=40_000, slices=[columns])
    settings = PackSettings(sequence_length=8192, buffer_size=1000)
    pool = pack_pool([source], settings, num_packs=512, num_replicates=3, num_streams=1)
    cluster = Cluster(num_ranks=16, expert_parallel=8)
    found = balance(pool, cluster, 32)

    meeting = cluster.topology.meeting(Mode.EP)
    ratios = []
    for seed in range(3):
        costs = checked_costs(*dealt(MIXES["web"], 16, 32, seed=seed), 16)
        plan = assign(costs.encoder, costs.llm, cluster.topology)
        ratios.append((plan.before.ratio, measure(costs, plan.taken, meeting).ratio))
    arrival, after = np.mean(ratios, axis=0)
    (expert,) = (mode for mode in found.modes if mode.is_auto)
    assert found.arrival.value == pytest.approx(arrival, abs=0.1)
    assert expert.imbalance.value == pytest.approx(after, abs=0.02)
    assert pool.efficiency.value > 0.999
    assert expert.moved_share.value < 0.37
