"""What a stream's state says of the stream it belongs to, and how another one is refused. Plain values, so that every trainer's
checkpoint reader takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from packer.format.errors import UsageError

VERSION = 2

LoaderState = dict[str, Any]

_WAYS_OUT = {
    "world_size": "resume on as many data-parallel ranks; another number would lose or repeat samples",
    "rank": "give every rank its own state",
    "num_workers": "resume with as many loader workers",
    "seed": "resume with that seed",
    "profile": "resume with that profile",
    "profile_fingerprint": "the profile counts otherwise now; resume with the index that was trained on",
    "sources": "the samples of these sources are others now (packed or indexed again, other exclusion lists) or blended "
    "otherwise; resume with what was trained on, and sources and weights as they were",
    "choice": "other samples would share packs; keep these settings",
    "limits": "packs were planned with other limits; keep to those",
}


class _Known(TypedDict):
    num_packs: int
    is_between_epochs: bool
    packs_of_epoch: list[int]
    energon: Any


def read_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> _Known:
    """The parts of a state, if it belongs to this stream.

    Raises:
        UsageError: naming each field that differs, with both values.
    """
    if isinstance(state, Mapping) and "snapshot" in state and "yielded" in state:
        raise UsageError(
            "restore_state: found the state of a balanced loader, expected one of a loader alone; restore it into a "
            "`BalancedPackLoader`, or, between two global batches (`yielded` 0), its `snapshot` into this"
        )
    if not isinstance(state, Mapping) or "version" not in state or "energon" not in state:
        raise UsageError(f"restore_state: found {type(state).__name__} without a version, expected what `save_state` gave")
    if state["version"] != VERSION:
        raise UsageError(
            f"restore_state: found a state of version {state['version']!r}, expected {VERSION}; resume with the "
            "release that saved it"
        )
    wrong = [name for name in expected if state.get(name) != expected[name]]
    if wrong:
        raise UsageError("restore_state: " + "; ".join(_difference(name, state.get(name), expected[name]) for name in wrong))
    return {name: state[name] for name in _Known.__annotations__}  # type: ignore[return-value]


def _difference(name: str, found: Any, expected: Any) -> str:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
        found, expected = {key: found.get(key) for key in keys}, {key: expected.get(key) for key in keys}
    return f"found {name} {found!r} in the state, {expected!r} here: {_WAYS_OUT[name]}"


_OF_A_SOURCE = ("rows", "split_part", "val", "shuffle_over_epochs", "parallel_shard_iters", "max_samples_per_sequence", "subset")


def sources_of(config: Any) -> dict[str, str]:
    """Fingerprints of the rows of each source in a dataset's configuration, and how it is blended, wherever it stands in it."""
    found: dict[str, str] = {}
    for source, blended in _sources(config, ()):
        name = str(source["_path"]).rstrip("/").rpartition("/")[2]
        found[f"{len(found)}:{name}"] = " ".join([*(f"{key}={source[key]}" for key in _OF_A_SOURCE), *blended])
    return found


def profiles_of(config: Any) -> set[str]:
    """Of all sources in a dataset's configuration."""
    return {source["profile"] for source, _ in _sources(config, ())}


def _sources(config: Any, blended: tuple[str, ...]) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """Each source, and the kinds, weights and repetitions of the datasets it stands in."""
    if isinstance(config, Mapping):
        if "rows" in config and "split_part" in config:
            yield config, blended
            return
        if "repeats" in config:
            blended = (*blended, f"repeats={config['repeats']}")
        if "datasets" in config:
            blended = (*blended, f"in={config.get('type')}")
        for inner, weight in config.get("dataset_weights", ()):
            yield from _sources(inner, (*blended, f"in={config.get('type')}", f"weight={weight}"))
        for key, value in config.items():
            if key != "dataset_weights":
                yield from _sources(value, blended)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _sources(value, blended)
