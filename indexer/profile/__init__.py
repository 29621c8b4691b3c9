"""A profile: one way of counting, with everything that decides a length, and its fingerprint."""

from __future__ import annotations

from indexer.profile.opening import COUNTING_VERSION, OpenProfile, open_profile
from indexer.profile.settings import ImageSettings, Profile, TemplateSettings, TokenizerSettings
from indexer.profile.stored import (
    StoredProfile,
    difference,
    open_copy,
    open_stored,
    profile_names,
    read_profile,
    write_profile,
)

__all__ = [
    "COUNTING_VERSION",
    "ImageSettings",
    "OpenProfile",
    "Profile",
    "StoredProfile",
    "TemplateSettings",
    "TokenizerSettings",
    "difference",
    "open_copy",
    "open_profile",
    "open_stored",
    "profile_names",
    "read_profile",
    "write_profile",
]
