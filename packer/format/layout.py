"""Every file name of a dataset. Nothing else in the project builds or takes apart such a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import blake3

DATASET_FILE = "bayplan.json"
RECIPE_FILE = "recipe.yaml"
STOCK_FILE = "stock.yaml"
INVENTORY_FILE = "inventory.json"
SOURCES_DIR = "sources"
SOURCE_FILE = "source.json"

RECORDS_SUFFIX = ".jsonl"
OFFSETS_SUFFIX = ".jsonl.idx"
BUNDLE_SUFFIX = ".zip"
QUARANTINE_SUFFIX = ".quarantine.jsonl"
MANIFEST_SUFFIX = ".part.json"
PART_SUFFIXES = (RECORDS_SUFFIX, OFFSETS_SUFFIX, BUNDLE_SUFFIX, QUARANTINE_SUFFIX)

INDEX_DIR = "index"
PROFILE_FILE = "profile.json"
PROFILE_DATASET_FILE = "dataset.yaml"
TABLE_SUFFIX = ".arrow"
IDS_SUFFIX = ".ids.arrow"
EXCLUDE_DIR = "exclude"
REPORT_DIR = "report"

TEMPORARY_PREFIX = ".tmp-"
"""Files with this prefix are work in progress of some process: never read, removed when a day old."""

_PART_ID = re.compile(r"(?P<file>[0-9a-f]{12})-r(?P<range>\d{5,})-p(?P<roll>\d{5,})(?:-retry(?P<retry>\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class PartId:
    """Identity of a part: which file, which range of it, which roll inside the range, which retry of that roll."""

    file_hash: str
    range_index: int
    roll: int
    retry: int = 0
    """0 for the part itself; k for the k-th part made of its quarantined rows."""

    def __str__(self) -> str:
        base = f"{self.file_hash}-r{self.range_index:05d}-p{self.roll:05d}"
        return f"{base}-retry{self.retry}" if self.retry else base

    @classmethod
    def parse(cls, text: str) -> PartId | None:
        """The identity written as `text`, or None when it is not one."""
        match = _PART_ID.fullmatch(text)
        if match is None:
            return None
        return cls(match["file"], int(match["range"]), int(match["roll"]), int(match["retry"] or 0))


def file_hash(relative_path: str) -> str:
    """12 hex digits naming an input file by its path relative to its source's root."""
    return blake3.blake3(relative_path.encode()).hexdigest()[:12]


def source_dir(source: str) -> str:
    """Folder of a source, relative to the dataset."""
    return f"{SOURCES_DIR}/{source}"


def source_file(source: str) -> str:
    """The consolidated manifest of a source, relative to the dataset."""
    return f"{SOURCES_DIR}/{source}/{SOURCE_FILE}"


def part_file(source: str, part_id: str, suffix: str) -> str:
    """One file of a part, relative to the dataset."""
    return f"{SOURCES_DIR}/{source}/{part_id}{suffix}"


def nv_meta_file(source: str, name: str) -> str:
    """A file by which Energon knows a source as a dataset of its own, relative to the dataset."""
    return f"{SOURCES_DIR}/{source}/.nv-meta/{name}"


def nv_meta_profile(profile: str) -> str:
    """Name of the file there that loads the source under a profile; no profile's name makes it another file of Energon's."""
    return f"profile-{profile}.yaml"


def part_of(file_name: str) -> str | None:
    """The part a file of a source folder belongs to, or None for generated and foreign files."""
    for suffix in (MANIFEST_SUFFIX, QUARANTINE_SUFFIX, OFFSETS_SUFFIX, RECORDS_SUFFIX, BUNDLE_SUFFIX):
        if file_name.endswith(suffix):
            stem = file_name.removesuffix(suffix)
            return stem if PartId.parse(stem) else None
    return None


def index_dir(profile: str) -> str:
    """Folder of a profile's index, relative to the dataset."""
    return f"{INDEX_DIR}/{profile}"


def profile_file(profile: str) -> str:
    """What a profile counts with, relative to the dataset."""
    return f"{index_dir(profile)}/{PROFILE_FILE}"


def profile_tokenizer_file(profile: str, suffix: str) -> str:
    """The dataset's own copy of a profile's tokenizer; `suffix` is that of the original file."""
    return f"{index_dir(profile)}/tokenizer{suffix}"


def profile_dataset_file(profile: str) -> str:
    """The blend of a profile for Energon, relative to the dataset."""
    return f"{index_dir(profile)}/{PROFILE_DATASET_FILE}"


def index_parts_dir(profile: str, source: str) -> str:
    """Folder of a source's index parts, relative to the dataset."""
    return f"{index_dir(profile)}/parts/{source}"


def index_part_file(profile: str, source: str, part_id: str) -> str:
    """The index of one part, relative to the dataset."""
    return f"{index_parts_dir(profile, source)}/{part_id}{TABLE_SUFFIX}"


def index_quarantine_dir(profile: str, source: str) -> str:
    """Folder of the records of a source that a profile cannot count, relative to the dataset."""
    return f"{index_dir(profile)}/quarantine/{source}"


def index_quarantine_file(profile: str, source: str, part_id: str) -> str:
    """The records of one part that a profile cannot count, relative to the dataset."""
    return f"{index_quarantine_dir(profile, source)}/{part_id}.jsonl"


def index_table_file(profile: str, source: str) -> str:
    """The index of a whole source, relative to the dataset."""
    return f"{index_dir(profile)}/{source}{TABLE_SUFFIX}"


def index_ids_file(profile: str, source: str) -> str:
    """The sorted id hashes of a source, relative to the dataset."""
    return f"{index_dir(profile)}/{source}{IDS_SUFFIX}"


def table_source_of(file_name: str) -> str | None:
    """The source whose whole index a file of a profile's folder is, or None for every other file."""
    stem, dot, rest = file_name.partition(".")
    return stem if stem and dot + rest == TABLE_SUFFIX else None
