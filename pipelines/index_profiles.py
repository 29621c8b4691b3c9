"""The profiles of an index job: which are meant, whether each can count, and what of the dataset must be written before it does.

Nothing is written until all of them are open: a mistake in one leaves the dataset as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from indexer.image_rules.lookup import nearest
from indexer.profile import (
    OpenProfile,
    StoredProfile,
    check_counted_with,
    difference,
    open_copy,
    open_profile,
    profile_names,
    read_profile,
    write_profile,
)
from packer.format.errors import BayplanError, FormatError, UsageError
from packer.storage import Storage
from pipelines.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyProfile:
    """A profile that can count."""

    opened: OpenProfile
    tokenizer_origin: str
    tokenizer: bytes
    is_stored: bool
    """Whether the dataset has it as it is now."""
    note: str | None = None

    def store(self, storage: Storage) -> None:
        """Make the dataset have it."""
        if not self.is_stored:
            write_profile(storage, self.opened, self.tokenizer_origin, self.tokenizer)


def wanted_profiles(names: Sequence[str], recipe: Recipe, storage: Storage, *, is_given: bool) -> list[str]:
    """Those asked for; else all of a recipe that was given, or all that the dataset keeps and has been indexed by.

    Raises:
        UsageError: naming those that are not known; or there is none at all.
    """
    known = sorted({*recipe.profiles, *profile_names(storage)})
    if not known:
        raise UsageError(
            f"{storage.url}: found no profile, expected at least one: add `profiles` to the recipe (docs/recipe.md), then run "
            "`bayplan index DATASET --recipe RECIPE`"
        )
    if unknown := [name for name in dict.fromkeys(names) if name not in known]:
        raise UsageError(
            "\n".join(f"found no profile {name!r} in the recipe or the index{nearest(name, known)}" for name in unknown)
        )
    return list(dict.fromkeys(names)) or (list(recipe.profiles) if is_given and recipe.profiles else known)


def open_profiles(storage: Storage, recipe: Recipe, names: Sequence[str], *, replace_changed: bool) -> list[ReadyProfile]:
    """Open them all.

    Raises:
        UsageError: what is wrong with each that cannot be used. FormatError: a file of the dataset is damaged.
    """
    ready: list[ReadyProfile] = []
    problems: list[BayplanError] = []
    for name in names:
        try:
            ready.append(_open(storage, recipe, name, replace_changed))
        except (UsageError, FormatError) as error:
            problems.append(error)
    if problems:
        kind = UsageError if any(isinstance(error, UsageError) for error in problems) else FormatError
        raise kind("\n".join(map(str, problems)))
    return ready


def _open(storage: Storage, recipe: Recipe, name: str, replace_changed: bool) -> ReadyProfile:
    stored = read_profile(storage, name)
    model = recipe.profiles.get(name)
    gone: list[str] = []
    if model is None:
        assert stored is not None  # a wanted profile is the recipe's or the dataset's
        file, settings, is_kept = stored.tokenizer_origin, stored.profile, True
    else:
        file = model.tokenizer_file
        gone = [path for path in (file, model.template_file) if path is not None and not Path(path).exists()]
        settings = model.settings(name, kept_template=stored.profile.template.text if stored else None)
        is_kept = stored is not None and file in gone and file == stored.tokenizer_origin
    if is_kept:
        assert stored is not None
        opened = open_copy(storage, settings, stored.tokenizer_file)
        tokenizer = storage.read_bytes(stored.tokenizer_file)
    else:
        opened = open_profile(settings, file)
        tokenizer = Path(file).read_bytes()
    note = f"profile {name!r}: {' and '.join(gone)} is gone; its copy in the dataset is used" if gone else None
    if stored is not None and stored.fingerprint != opened.fingerprint and not replace_changed:
        raise UsageError(
            f"profile {name!r} changed since it was indexed: {difference(stored, opened)}: "
            "undo the change, give it another name, or let `--replace-changed` drop its index and count anew"
        )
    if stored is not None and stored.fingerprint == opened.fingerprint:
        check_counted_with(opened, stored.counted_with)
    known = stored and (stored.fingerprint, stored.profile, stored.tokenizer_origin)
    is_stored = known == (opened.fingerprint, opened.profile, file) and _has_copy(storage, stored, tokenizer)
    return ReadyProfile(opened=opened, tokenizer_origin=file, tokenizer=tokenizer, is_stored=is_stored, note=note)


def _has_copy(storage: Storage, stored: StoredProfile | None, tokenizer: bytes) -> bool:
    """Whether the dataset's copy of the tokenizer is there and the same: it may have been lost or damaged since."""
    try:
        return stored is not None and storage.read_bytes(stored.tokenizer_file) == tokenizer
    except FileNotFoundError:
        return False
