"""Four real processes in Megatron's groups over gloo: who reads what, who pads to what, and resuming on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_ranks import Layout, Seen, run_job

LAYOUTS = {
    "dp4": Layout(),
    "tp2 dp2, sequence parallel": Layout(tensor=2, sequence_parallel=True),
    "cp2 dp2": Layout(context=2, num_workers=2),
    "pp2 dp2": Layout(pipeline=2),
    "tp2 cp2, sequence parallel": Layout(tensor=2, context=2, sequence_parallel=True),
    "cp2 pp2": Layout(context=2, pipeline=2),
}
ALIGNMENTS = dict(zip(LAYOUTS, (1, 2, 4, 1, 4, 4), strict=True))


@pytest.fixture(scope="module")
def job(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Seen]]]:
    folder = tmp_path_factory.mktemp("job")
    return folder, dict(zip(LAYOUTS, run_job(dataset, folder, list(LAYOUTS.values()), num_ranks=4), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_replica_read_the_same_and_replicas_do_not(job: tuple[Path, dict[str, list[Seen]]], name: str) -> None:
    layout, ranks = LAYOUTS[name], job[1][name]
    size = 4 // (layout.tensor * layout.context * layout.pipeline)
    assert {rank.dp_size for rank in ranks} == {size}
    streams = {(rank.dp_rank, tuple((one.tokens, one.grids) for one in rank.before)) for rank in ranks}
    assert sorted(dp_rank for dp_rank, _ in streams) == list(range(size))
    assert len({packs for _, packs in streams}) == size


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_above_the_first_get_grids_and_no_pixels(job: tuple[Path, dict[str, list[Seen]]], name: str) -> None:
    for rank in job[1][name]:
        with_images = [one for one in rank.before + rank.after if one.grids]
        assert with_images
        assert {one.has_pixels for one in with_images} == {rank.stage == 0}


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_are_padded_to_what_the_groups_ask_for(job: tuple[Path, dict[str, list[Seen]]], name: str) -> None:
    starts = {start for rank in job[1][name] for one in rank.before for start in one.starts}
    assert len(starts) > 4
    assert all(start % ALIGNMENTS[name] == 0 for start in starts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_goes_on_where_its_replica_was_saved(job: tuple[Path, dict[str, list[Seen]]], name: str) -> None:
    for rank in job[1][name]:
        assert rank.resumed == rank.after
        assert not set(rank.after) & set(rank.before)


@pytest.mark.parametrize(("place", "name"), list(enumerate(LAYOUTS)))
def test_each_replica_saved_one_file(job: tuple[Path, dict[str, list[Seen]]], place: int, name: str) -> None:
    found = sorted(path.name for path in (job[0] / f"layout-{place}" / "iter_0000004").iterdir())
    assert found == [f"train_dataloader_dprank{rank:03d}.pt" for rank in range(job[1][name][0].dp_size)]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "dp4"])
def test_the_state_of_more_ranks_is_refused_with_both_numbers(job: tuple[Path, dict[str, list[Seen]]], name: str) -> None:
    for rank in job[1][name]:
        assert f"found world_size 4 in the state, {rank.dp_size} here" in rank.error
