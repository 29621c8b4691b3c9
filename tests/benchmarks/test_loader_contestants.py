"""What the loader's benchmark compares is the same work: all contestants deliver the same samples, token for token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugin.batch import PatchImage
from plugin.batch.core import PackedBatch
from plugin.settings import PackSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_SAMPLES = 40
SETTINGS = PackSettings(sequence_length=4096, max_patches_per_pack=16384, buffer_size=16, num_threads=2)

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark's modules, which import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        before = set(sys.modules)
        import loader_contestants

        yield loader_contestants
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def layouts(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from loader_corpus import write_documents

    return write_documents(tmp_path_factory.mktemp("bench"), NUM_SAMPLES)


def delivered(bench: Any, layouts: Any, contestant: str, *, decodes: bool) -> dict[str, Any]:
    """Of one epoch, by id: tokens, labels, and pixels of each image."""
    run = bench.Run(
        contestant=contestant,
        layouts=layouts,
        profile_url=layouts.ours,
        settings=SETTINGS,
        decodes=decodes,
        num_workers=0,
        shuffle_size=8,
        repeat=False,
    )
    found: dict[str, Any] = {}
    for pack in bench.packs_of(run):
        assert isinstance(pack.batch, PackedBatch)
        for sample in pack.batch.unpack():
            assert sample.sample_id not in found
            encoded = sample.encoded
            images = [_pixels(image) for image in sample.images]
            found[sample.sample_id] = (encoded.ids.tolist(), encoded.loss_mask.tolist(), encoded.image_spans, images)
    return found


def _pixels(image: Any) -> Any:
    assert isinstance(image, PatchImage)
    return image.grid_thw, None if image.pixels is None else image.pixels.tobytes()


@pytest.mark.parametrize("decodes", [True, False])
def test_all_contestants_deliver_the_same_samples(bench: Any, layouts: Any, decodes: bool) -> None:
    ours = delivered(bench, layouts, bench.OURS, decodes=decodes)
    assert len(ours) == NUM_SAMPLES
    pixels = [data for *_, images in ours.values() for _, data in images]
    assert len(pixels) > NUM_SAMPLES
    assert all((data is not None) == decodes for data in pixels)
    for contestant in bench.CONTESTANTS[1:]:
        assert delivered(bench, layouts, contestant, decodes=decodes) == ours, contestant
