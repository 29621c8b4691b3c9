"""A profile: one way of counting, with everything that decides a length, and its fingerprint."""

from __future__ import annotations

from indexer.profile.counted_with import CountedWith, check_counted_with, counted_with
from indexer.profile.difference import difference
from indexer.profile.opening import COUNTING_VERSION, OpenProfile, open_profile
from indexer.profile.settings import ImageSettings, Profile, TemplateSettings, TokenizerSettings
from indexer.profile.stored import (
    StoredProfile,
    open_copy,
    open_stored,
    profile_names,
    read_profile,
    write_profile,
)

__all__ = [
    "COUNTING_VERSION",
    "CountedWith",
    "ImageSettings",
    "OpenProfile",
    "Profile",
    "StoredProfile",
    "TemplateSettings",
    "TokenizerSettings",
    "check_counted_with",
    "counted_with",
    "difference",
    "open_copy",
    "open_profile",
    "open_stored",
    "profile_names",
    "read_profile",
    "write_profile",
]
