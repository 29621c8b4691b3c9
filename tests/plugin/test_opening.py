"""What a trainer may say wrongly when it opens a stream, blends that Energon refuses, and datasets in stores."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs
from loading import PROFILE, SETTINGS, digests, opened, write_stream

from packer.format.errors import UsageError
from plugin.loader import PackLoader
from plugin.opening import energon_path

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "found rank 2, expected a whole number from 0 to 1: of the data-parallel ranks alone"),
        ({"rank": -1}, "found rank -1"),
        ({"world_size": 0}, "found world_size 0"),
        ({"num_workers": "2"}, "found num_workers '2'"),
        ({"num_workers": -1}, "found num_workers -1"),
        ({"seed": "a"}, "found seed 'a'"),
        ({"prefetch_factor": 0}, "found prefetch_factor 0"),
        ({"shuffle_buffer_size": 2.5}, r"found shuffle_buffer_size 2\.5"),
        ({"split": "test"}, "found the split 'test', expected 'train' or 'val'"),
        ({"peers": 3}, "found peers of type int"),
        ({"settings": {"sequence_length": 64}}, "found settings of type dict"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_its_name(url: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PackLoader.open(url, PROFILE, **{"settings": SETTINGS, **arguments})


# --- blends


def blend(url: str, *weights: object) -> str:
    path = Path(url) / "index" / PROFILE / "blend.yaml"
    names = ["text", "docs"][: len(weights)]
    listed = "".join(
        f"      - {{weight: {weight}, path: ../../sources/{name}, dataset_config: profile-{PROFILE}.yaml}}\n"
        for name, weight in zip(names, weights, strict=True)
    )
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{listed}")
    return str(path)


@pytest.mark.parametrize("weights", [(0,), (0, 1), (1, 0), (-1, 1), (-1, 3), ("x",)])
def test_a_weight_that_is_none_is_refused_when_the_blend_is_opened(url: str, weights: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match=r"blend\.yaml: Energon does not open this blend .*weights are numbers above 0"):
        opened(url, blend=blend(url, *weights))


def test_a_blend_that_is_not_there_is_refused_by_name(url: str) -> None:
    with pytest.raises(UsageError, match=r"^/nowhere\.yaml: Energon does not open this blend"):
        opened(url, blend="/nowhere.yaml")


def test_a_worker_without_a_sample_says_so(url: str) -> None:
    """More of them than samples."""
    with (
        opened(url, blend=blend(url, 1), rank=999, world_size=1000) as stream,
        pytest.raises(UsageError, match=r"no usable sample for loader worker 0 of rank 999, .* each of 1000 ranks x 1 workers"),
    ):
        next(stream)


# --- a loader where it cannot be


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_not_copied(url: str, copied: Any) -> None:
    with opened(url) as stream:
        with pytest.raises(UsageError, match="a `PackLoader` that is to be pickled or copied"):
            copied(stream)
        next(stream)


def test_workers_of_a_loader_around_it_would_each_give_the_same_packs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url) as stream:
        with monkeypatch.context() as patch:
            patch.setattr("torch.utils.data._utils.worker._worker_info", object())
            with pytest.raises(UsageError, match="a `PackLoader` in a worker of torch's DataLoader"):
                next(stream)
        assert len(digests(stream, 2)) == 2


# --- where a dataset may lie


def test_a_folder_may_be_a_path_or_a_file_url(url: str) -> None:
    found = []
    for form in (url, Path(url), f"file://{url}"):
        with opened(form) as stream:  # type: ignore[arg-type]
            found.append(digests(stream, 3))
    assert found[0] == found[1] == found[2]


def test_a_store_that_energon_cannot_read_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"memory://bucket/data: .*give msc://<profile>/<path>, or give a `blend`"):
        energon_path("memory://bucket/data")
    assert energon_path("msc://store/data") == "msc://store/data"


def test_a_forked_worker_reads_a_dataset_in_s3(url: str, s3: str) -> None:
    """And the trainer beside it, whose connections it must not use; states go from a folder to a store."""
    fs, bucket = url_to_fs(s3)
    fs.put(f"{url}/", f"{bucket}/", recursive=True)
    with opened(url, num_workers=1) as stream:
        digests(stream, 3)
        state = stream.save_state()
        whole = digests(stream, 5)
    with opened(url) as stream:
        alone = digests(stream, 4)
    with opened(s3) as beside:
        found = digests(beside, 2)
        with opened(s3, num_workers=1) as stream:
            stream.restore_state(state)
            following = digests(stream, 3)
            found += digests(beside, 2)
            following += digests(stream, 2)
    assert following == whole
    assert found == alone
