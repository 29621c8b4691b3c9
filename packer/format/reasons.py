"""Reason codes of quarantined rows and dropped images. Codes are part of the format: added, never renamed or reused."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a row was quarantined (or an image dropped). `EXPLANATIONS` says each in words."""

    # The line itself.
    LINE_TOO_LONG = "line_too_long"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    LONE_SURROGATE = "lone_surrogate"
    NON_FINITE_NUMBER = "non_finite_number"
    NESTING_TOO_DEEP = "nesting_too_deep"
    TRUNCATED_INPUT = "truncated_input"
    KILLS_WORKER = "kills_worker"
    # What the schema found in it.
    SCHEMA_MISMATCH = "schema_mismatch"
    SCHEMA_ERROR = "schema_error"
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    UNSUPPORTED_MEDIA = "unsupported_media"
    EMPTY_SAMPLE = "empty_sample"
    TOO_MANY_IMAGES = "too_many_images"
    NOT_WRITABLE = "not_writable"
    INTERNAL_ERROR = "internal_error"
    # The reference to an image.
    MISSING_IMAGE = "missing_image"
    UNREADABLE_IMAGE = "unreadable_image"
    REFERENCE_OUTSIDE_ROOT = "reference_outside_root"
    UNSUPPORTED_REFERENCE = "unsupported_reference"
    REMOTE_NOT_ALLOWED = "remote_not_allowed"
    INVALID_BASE64 = "invalid_base64"
    # The bytes of an image.
    EMPTY_IMAGE = "empty_image"
    IMAGE_TOO_LARGE = "image_too_large"
    NOT_AN_IMAGE = "not_an_image"
    UNSUPPORTED_IMAGE_FORMAT = "unsupported_image_format"
    TRUNCATED_IMAGE = "truncated_image"
    CORRUPT_IMAGE = "corrupt_image"
    TOO_MANY_PIXELS = "too_many_pixels"
    IMAGE_TOO_SMALL = "image_too_small"
    ASPECT_RATIO = "aspect_ratio"
    CONVERSION_FAILED = "conversion_failed"


EXPLANATIONS: dict[Reason, str] = {
    Reason.LINE_TOO_LONG: "the line is longer than the source's `max_line_bytes`",
    Reason.INVALID_UTF8: "the line is not valid UTF-8",
    Reason.INVALID_JSON: "the line is not one JSON object",
    Reason.LONE_SURROGATE: "a \\u escape is half of a surrogate pair, so the text cannot be written as UTF-8",
    Reason.NON_FINITE_NUMBER: "NaN, Infinity or a number beyond a double; `non_finite: null` turns them into null",
    Reason.NESTING_TOO_DEEP: "lists and objects nested more than 200 levels",
    Reason.TRUNCATED_INPUT: "the file ends inside this line (a cut upload or a writer that died)",
    Reason.KILLS_WORKER: "the row killed or hung its worker process twice when tried alone",
    Reason.SCHEMA_MISMATCH: "a field the schema needs is missing or of another type",
    Reason.SCHEMA_ERROR: "the recipe's own schema function raised an error",
    Reason.PLACEHOLDER_MISMATCH: "number of image placeholders and number of images differ",
    Reason.UNSUPPORTED_MEDIA: "audio, video or another medium that format version 1 cannot hold",
    Reason.EMPTY_SAMPLE: "no text and no image is left in the sample",
    Reason.TOO_MANY_IMAGES: "more images than the source's `max_per_sample`",
    Reason.NOT_WRITABLE: "the row parses but cannot be written back as JSON",
    Reason.INTERNAL_ERROR: "an error in bayplan itself on this row; please report it with the row",
    Reason.MISSING_IMAGE: "the reference names nothing that exists",
    Reason.UNREADABLE_IMAGE: "the reference exists but may not be read (permission, a folder)",
    Reason.REFERENCE_OUTSIDE_ROOT: "the path climbs out of its `image_root`",
    Reason.UNSUPPORTED_REFERENCE: "a kind of reference or archive that is not supported",
    Reason.REMOTE_NOT_ALLOWED: "an http(s) reference to a host the recipe does not allow by name",
    Reason.INVALID_BASE64: "a data: URL or base64 text that does not decode",
    Reason.EMPTY_IMAGE: "the image has zero bytes",
    Reason.IMAGE_TOO_LARGE: "the image file is larger than the source's `max_bytes`",
    Reason.NOT_AN_IMAGE: "the bytes are not an image (HTML error page, text, unknown)",
    Reason.UNSUPPORTED_IMAGE_FORMAT: "a known format without pixels we can count (SVG, PDF, video)",
    Reason.TRUNCATED_IMAGE: "the image ends before its own structure says",
    Reason.CORRUPT_IMAGE: "the image's structure contradicts itself or a checksum fails",
    Reason.TOO_MANY_PIXELS: "width x height is above the source's `max_pixels`",
    Reason.IMAGE_TOO_SMALL: "a side is below the source's `min_side`",
    Reason.ASPECT_RATIO: "the longer side divided by the shorter is above `max_aspect_ratio`",
    Reason.CONVERSION_FAILED: "the conversion the recipe asks for failed on this image",
}
