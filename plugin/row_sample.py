"""The crude sample of an index row. Looked at by a person, as `energon preview` does, it shows its counts and its record too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from megatron.energon import CrudeSample

from packer.format.errors import BayplanError
from plugin.reader import BundleReader

_SHOWN_CHARS = 4000
_SHOWN_FIELDS = ("num_tokens", "num_text_tokens", "num_image_tokens", "num_loss_tokens", "num_images")


class ShownText(str):
    """Text that is shown as it stands; Energon shows the `repr` of what it previews."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# Energon previews fields of dataclasses only; the dict that cookers get has nothing of them, so nothing is read for training.
@dataclass(init=False, repr=False, eq=False)
class RowSample(CrudeSample):  # type: ignore[misc]
    """`sample["row"]` is an `IndexRow`. The fields below are for looking only; `record` is read whenever it is asked for."""

    key: str
    num_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_loss_tokens: int
    num_images: int
    record: str

    def __getattr__(self, name: str) -> Any:
        if name in _SHOWN_FIELDS:
            return getattr(self["row"], name)
        if name == "key":
            return self["__key__"]
        if name == "record":
            return ShownText(self._record_text())
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _record_text(self) -> str:
        """The record, long ones cut. Never raises: Energon also shows samples while it reports what went wrong with them."""
        try:
            text = orjson.dumps(self._read_record(), option=orjson.OPT_INDENT_2).decode()
        except BayplanError as error:
            return f"not read: {error}"
        return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text):,} characters)"

    def _read_record(self) -> dict[str, Any]:
        dataset_url = self["__sources__"][0].dataset_path.rsplit("/", 2)[0]
        reader = BundleReader(dataset_url)
        try:
            return reader.read_record(self["row"])
        finally:
            reader.close()
