"""The recipe's models: every key, its type, default, bounds and meaning. Loading, paths and wording live beside it.

A model checks itself; what only several sources together can break is `mixture_problems`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipelines.recipe_paths import fits, source_root
from pipelines.recipe_profiles import ProfileModel
from pipelines.recipe_types import (
    FIELD_DEFAULTS,
    GIB,
    MIB,
    BundleSize,
    ByteSize,
    Globs,
    Host,
    Keep,
    NonFinite,
    RangeSize,
    RayShare,
    SchemaName,
    Slug,
    Text,
    Version,
    problem,
)

LLAVA_ONLY = ("placeholder", "literal_placeholders")
NOT_IN_DEFAULTS = ("name", "files", "fields", "weight", "token_share", "as_written")

_RAY_NAMES = {
    "CPU": "; give `num_cpus`",
    "memory": "; give `memory_bytes`",
    "GPU": "; remove it",
    "object_store_memory": "; remove it",
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Conversion(_Model):
    """Re-encoding of images that do not fit; without it, images are stored byte for byte."""

    longest_side: int | None = Field(default=None, ge=1, description="Scale down to this many pixels on the longer side")
    format: Literal["jpeg", "png", "webp"] | None = Field(default=None, description="Format to write; null keeps it")
    quality: int | None = Field(default=None, ge=1, le=100, description="Quality of jpeg or webp")

    @field_validator("quality")
    @classmethod
    def _quality_needs_format(cls, quality: int | None, info: ValidationInfo) -> int | None:
        if quality is not None and info.data.get("format", "jpeg") not in ("jpeg", "webp"):
            found = info.data["format"] or "none"
            raise problem(f"quality needs `format: jpeg` or `format: webp`, found {found}; set one or remove quality")
        return quality

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.longest_side is None and self.format is None:
            raise problem("found nothing to convert; set longest_side or format, or write `convert: null`")
        return self


class ImagePolicy(_Model):
    """What an image must be like, and what happens when it is not."""

    max_per_sample: int | None = Field(default=None, ge=0, description="Most images of one sample; null: no limit")
    over_max: Literal["reject", "keep_first"] = Field(
        default="reject", description="A sample above max_per_sample: quarantine it, or keep its first images"
    )
    min_side: int = Field(default=1, ge=1, description="Least pixels of the shorter side")
    max_pixels: int = Field(default=2**28, ge=1, description="Most pixels (width x height)")
    max_aspect_ratio: float | None = Field(default=None, ge=1, description="Most of longer side / shorter side")
    max_bytes: ByteSize = Field(default=256 * MIB, description="Largest image file")
    check: Literal["header", "structure", "decode"] = Field(
        default="structure", description="How deep an image is checked: size only, its structure, every pixel"
    )
    on_error: Literal["drop_sample", "drop_image"] = Field(
        default="drop_sample", description="A bad image: quarantine the sample, or keep it without the image"
    )
    convert: Conversion | None = Field(default=None, description="Re-encode images; null stores them byte for byte")


class _Options(_Model):
    """The keys that `defaults` and every source share."""

    schema_name: SchemaName | None = Field(default=None, alias="schema", description="How a line is built")
    root: Text | None = Field(
        default=None, description="Folder the files' names are relative to; null: the common folder of the globs"
    )
    placeholder: Text = Field(default="<image>", description="llava: the text that stands for an image")
    literal_placeholders: Literal["quarantine", "text"] = Field(
        default="quarantine",
        description="llava: placeholder text that belongs to no image (not in the user's turn, or no images at all)",
    )
    image_root: Text | None = Field(default=None, description="Folder of the images; null: the source's root")
    archive: Text | None = Field(default=None, description="Zip or tar that holds the images")
    allow_hosts: Annotated[tuple[Host, ...], Field(strict=False)] = Field(
        default=(), description="Hosts from which http(s) images may be read"
    )
    keep: Keep = Field(default="all", description="Top-level fields carried along; all: every one the schema did not use")
    val: float = Field(default=0.0, ge=0, le=0.5, description="Share of the samples held out for validation")
    non_finite: NonFinite = Field(default="quarantine", description="A row with NaN or Infinity: quarantine it, or null")
    max_line_bytes: ByteSize = Field(default=64 * MIB, le=1024 * GIB, description="Longest line; longer ones are quarantined")
    range_bytes: RangeSize | None = Field(
        default=None, description="Input bytes of one task, a power of two; null: found by sampling, then pinned"
    )
    target_bundle_bytes: BundleSize = Field(default=GIB, description="Size at which a bundle is closed, below 4 GiB")
    row_timeout_seconds: float = Field(default=300.0, gt=0, le=604_800, description="Longest time one row may take")
    images: ImagePolicy = Field(default=ImagePolicy(), description="What images must be like")


class Defaults(_Options):
    """Values for every source that does not say otherwise; `images` is merged key by key."""


class Source(_Options):
    """One named JSONL input of many files."""

    name: Slug = Field(description="Name of the source and of its folder in the dataset")
    files: Globs = Field(description="Globs of JSONL files (plain, .gz, .zst), local or any fsspec URL")
    schema_name: SchemaName = Field(alias="schema", description="How a line is built")
    fields: dict[str, Text] = Field(default={}, validate_default=True, description="Where the schema's parts stand in a line")
    weight: float | None = Field(default=None, gt=0, description="Share of the mixture, by samples; 1 when not given")
    token_share: float | None = Field(default=None, gt=0, le=1, description="Share of the mixture, by tokens; sum is 1")
    as_written: dict[Literal["image_root", "archive"], Text] = Field(
        default={}, description="Only in resolved recipes: these paths as the user wrote them, for the fingerprint"
    )

    @field_validator("fields")
    @classmethod
    def _complete(cls, fields: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        schema = info.data.get("schema_name")
        if schema is None:  # its own mistake is reported
            return fields
        if schema not in FIELD_DEFAULTS:
            return {"id": "id", **fields}
        known = FIELD_DEFAULTS[schema]
        if unknown := [key for key in fields if key not in known]:
            raise problem(f"unknown fields for the schema {schema}", unknown=unknown, known=list(known), schema=schema)
        return {**known, **fields}

    @field_validator(*LLAVA_ONLY)  # runs for given keys only
    @classmethod
    def _llava_only(cls, value: str, info: ValidationInfo) -> str:
        schema = info.data.get("schema_name", "llava")
        if schema != "llava":
            raise problem(f"only the schema llava has it, found `schema: {schema}`; remove the key")
        return value

    @field_validator("as_written")
    @classmethod
    def _still_fits(cls, written: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for key, path in written.items():
            resolved = info.data.get(key)
            if resolved is None or not fits(path, resolved):
                raise problem(f"found {path!r}, which cannot mean {key} {resolved!r}; remove it from as_written")
        return written

    @property
    def resolved_root(self) -> str:
        """The folder that the files' names are relative to."""
        return self.root if self.root is not None else source_root(self.files)

    @property
    def resolved_image_root(self) -> str:
        """The folder that image references are relative to."""
        return self.image_root if self.image_root is not None else self.resolved_root


class Resources(_Model):
    """What one task asks of Ray."""

    num_cpus: RayShare = Field(default=1.0, description="CPUs of one task")
    memory_bytes: ByteSize | None = Field(default=None, description="Memory of one task; null: not reserved")
    custom: dict[Text, RayShare] = Field(default={}, description="Custom Ray resources of one task")
    max_tasks_in_flight: int | None = Field(default=None, ge=1, description="Most tasks at once; null: what Ray can hold")

    @field_validator("custom")
    @classmethod
    def _not_rays_own(cls, custom: dict[str, float]) -> dict[str, float]:
        for name in custom:
            if name in _RAY_NAMES:
                raise problem(f"found {name!r}, which is Ray's own, expected a custom resource{_RAY_NAMES[name]}")
        return custom


class Limits(_Model):
    """How much quarantine is still a success; above it the job ends with exit code 3."""

    max_quarantined_share: float | None = Field(default=None, ge=0, le=1, description="Of all rows read; null: no limit")
    max_quarantined: int | None = Field(default=None, ge=0, description="Rows; null: no limit")


class Recipe(_Model):
    """The one YAML file that says what a dataset is made of."""

    version: Version = Field(description="Version of the recipe's format")
    name: Slug = Field(description="Name of the dataset")
    output: Text = Field(
        description="Folder or URL of the dataset", json_schema_extra={"errorMessage": "the folder or URL of the dataset"}
    )
    defaults: Defaults = Field(default=Defaults(), description="Merged under each source on loading, then empty")
    sources: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)] = Field(description="The inputs")
    profiles: dict[Slug, ProfileModel] = Field(default={}, description="Ways of counting: tokenizer, template, image rule")
    resources: Resources = Field(default=Resources(), description="What one task asks of Ray")
    limits: Limits = Field(default=Limits(), description="How much quarantine is still a success")

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        sources = [{"name": s.name, "weight": s.weight, "token_share": s.token_share} for s in self.sources]
        if problems := mixture_problems(sources):
            raise PydanticCustomError("mixture", "{problems}", {"problems": "; ".join(text for _, text in problems)})
        return self


def mixture_problems(sources: Sequence[Mapping[str, object]]) -> list[tuple[int | None, str]]:
    """What several sources together do wrong, as (index of the source or None, message); values may be of any type."""
    problems: list[tuple[int | None, str]] = []
    first: dict[str, int] = {}
    for k, source in enumerate(sources):
        if isinstance(name := source.get("name"), str):
            before = first.setdefault(name.casefold(), k)
            if before != k:
                problems.append((k, f"found {name!r}, which is source {before + 1}'s name; names are folders, use each once"))
    weighted = [k for k, source in enumerate(sources) if source.get("weight") is not None]
    shared = [k for k, source in enumerate(sources) if source.get("token_share") is not None]
    if weighted and shared:
        found = f"found weight in {_names(sources, weighted)} and token_share in {_names(sources, shared)}"
        problems.append((None, f"{found}, expected one of the two in the whole recipe"))
    elif shared and len(shared) < len(sources):
        without = [k for k in range(len(sources)) if k not in set(shared)]
        found = f"found token_share in {len(shared)} of {len(sources)} sources, not in {_names(sources, without)}"
        problems.append((None, f"{found}; give it to all or to none"))
    elif shared:
        shares = [float(value) for s in sources if isinstance(value := s["token_share"], int | float)]
        in_range = len(shares) == len(sources) and all(0 < share <= 1 for share in shares)
        if in_range and not math.isclose(total := math.fsum(shares), 1.0, rel_tol=0, abs_tol=1e-6):
            problems.append((None, f"found token_share values that sum to {total:.9g}, expected 1"))
    return problems


def _names(sources: Sequence[Mapping[str, object]], indexes: Sequence[int]) -> str:
    shown = ", ".join(repr(sources[k].get("name", f"source {k + 1}")) for k in indexes[:3])
    return shown if len(indexes) <= 3 else f"{shown} and {len(indexes) - 3} more"
