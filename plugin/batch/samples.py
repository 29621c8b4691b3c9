"""`PackSample`: one sample on its way into a pack, and what `unpack` gives back."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.encode import EncodedSample
from packer.format.errors import UsageError
from plugin.batch.images import ImageForm, ImageState, PackImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackSample:
    sample_id: str
    source: str
    row: int
    """Of the source's index."""
    encoded: EncodedSample
    images: tuple[PackImage, ...]
    """One for each of `encoded.image_spans`, in their order."""
    num_text_tokens: int
    """The index's: special and wrapper tokens are not text."""
    num_patches: int = 0
    """The index's: inputs of the vision encoder."""
    encoder_cost: int = 0
    llm_cost: int = 0

    @property
    def num_image_tokens(self) -> int:
        return int(self.encoded.feature_mask.sum())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are predicted: the first of a sample never is, whatever its mask says."""
        return int(self.encoded.loss_mask[1:].sum())

    def refuse_unfit(self, form: ImageForm | None) -> None:
        """Raises:
        UsageError: when tokens, spans and images do not belong together; a model would stop, or see other pixels.
        """
        length, spans = len(self.encoded.ids), self.encoded.image_spans
        if not length or len(self.encoded.loss_mask) != length or len(self.encoded.feature_mask) != length:
            raise self._unfit(
                f"{length} ids, a loss mask of {len(self.encoded.loss_mask)} and a feature mask of "
                f"{len(self.encoded.feature_mask)}",
                "as many of each and at least one",
            )
        if len(spans) != len(self.images):
            raise self._unfit(f"{len(spans)} places for images and {len(self.images)} images", "as many of both")
        if self.images and form is None:
            raise self._unfit(f"{len(self.images)} images", "none, since the pack was given no image form")
        in_spans = 0
        previous = 0
        for place, (span, image) in enumerate(zip(spans, self.images, strict=True)):
            if not previous <= span.start < span.end <= length:
                raise self._unfit(f"image {place} at [{span.start}, {span.end})", f"a span within [{previous}, {length})")
            previous = span.end
            if image.state not in (ImageState.REAL, ImageState.BLANK):
                raise self._unfit(f"image {place} in state {image.state!r}", "REAL or BLANK: an ensured image is no sample's")
            num_features = int(self.encoded.feature_mask[span.start : span.end].sum())
            in_spans += num_features
            assert form is not None
            expected = form.num_features(image)
            if expected is not None and expected != num_features:
                raise self._unfit(
                    f"image {place} with {num_features} features in the sequence", f"{expected}, as its pixels give"
                )
        if in_spans != self.num_image_tokens:
            raise self._unfit(f"{self.num_image_tokens - in_spans} features outside of every image", "none")
        if not 0 <= self.num_text_tokens <= length - in_spans:
            raise self._unfit(
                f"{self.num_text_tokens} text tokens beside {in_spans} of images", f"{length} tokens at most in all, as encoded"
            )
        if self.num_patches < 0:
            raise self._unfit(f"{self.num_patches} patches", "0 or more")

    def _unfit(self, found: str, expected: str) -> UsageError:
        return UsageError(f"sample {self.sample_id!r} of {self.source!r}: found {found}, expected {expected}")
