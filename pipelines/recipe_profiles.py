"""The recipe's `profiles`: what each key means, and the plain profile the indexer works with."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from packer.format.errors import UsageError
from pipelines.recipe_paths import resolve_path
from pipelines.recipe_types import Text

if TYPE_CHECKING:
    from indexer.profile import Profile

BUILT_IN_TEMPLATES: tuple[Literal["document", "chatml"], ...] = ("document", "chatml")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class TokenizerModel(_Model):
    """A tokenizer's file and what its content does not say."""

    file: Text = Field(description="tokenizer.json, a tiktoken rank file, tekken.json, or a sentencepiece model")
    kind: Literal["huggingface", "tiktoken", "tekken", "sentencepiece"] | None = Field(
        default=None, description="Kind of file; null: found out from its content"
    )
    pattern: Text | None = Field(
        default=None, description="tiktoken: the split pattern, or qwen, llama3, llama4, cl100k, o200k for a published one"
    )
    special_tokens: dict[Text, int] | Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        default=(), description="Special tokens the file does not have: with their ids, or a list that gets the next free ids"
    )


class ImageRuleModel(_Model):
    """An image rule with other parameters than its preset's."""

    name: Text = Field(description="A preset's name, or your own module:function")
    parameters: dict[Text, Any] = Field(default={}, description="Values that replace the preset's")


class ImageLayoutModel(_Model):
    """Which tokens stand for an image, where the rule's own default is not right."""

    kind: Text | None = Field(default=None, description="Kind of layout; null: that of the image rule")
    parameters: dict[Text, Any] = Field(default={}, description="Its parameters, as token or before")


class ProfileModel(_Model):
    """One way of counting: tokenizer, template and image rule."""

    tokenizer: Text | TokenizerModel = Field(description="The tokenizer's file, or a mapping")
    template: Text = Field(description="document, chatml, or the file of a Jinja chat template")
    image_rule: Text | ImageRuleModel | None = Field(
        default=None, description="How images are counted; null: samples with images are not"
    )
    image_layout: ImageLayoutModel = Field(default=ImageLayoutModel(), description="Which tokens stand for an image")
    placeholder: Text | None = Field(
        default=None, description="What the chat template writes for an image; null: that of the image rule's models"
    )
    bos: Text | None = Field(default=None, description="Special token before a document; null: none")
    eos: Text | None = Field(default=None, description="Special token after a document; null: none")
    content: Literal["auto", "parts", "string"] = Field(
        default="auto", description="What a chat template gets as a message's content; auto: tried out"
    )
    date: Text | None = Field(default=None, description="The day a chat template is told, as 2024-07-26; null: it may not ask")
    variables: dict[Text, Any] = Field(default={}, description="Variables for the chat template, such as enable_thinking")
    assistant_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        default=(), description="Special tokens that an assistant's own text may hold as such, for instance <think>"
    )
    sequence_lengths: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(strict=False)] = Field(
        default=(), description="Lengths in tokens that samples are compared with"
    )

    @property
    def tokenizer_file(self) -> str:
        """Path of the tokenizer's file."""
        return self.tokenizer if isinstance(self.tokenizer, str) else self.tokenizer.file

    def _meant_template(self) -> str:
        """The end of a message on a template that cannot be read: a built-in one may have been meant."""
        if Path(self.template).exists():
            return ""
        near = difflib.get_close_matches(Path(self.template).name.lower(), BUILT_IN_TEMPLATES, n=1)
        known = " or ".join(BUILT_IN_TEMPLATES)
        return f"; did you mean the built-in {near[0]!r}?" if near else f"; expected such a file, or the built-in {known}"

    @property
    def template_file(self) -> str | None:
        """Path of the chat template's file; None for a built-in one."""
        return None if self.template in BUILT_IN_TEMPLATES else self.template

    def settings(self, name: str, kept_template: str | None = None) -> Profile:
        """The profile as the indexer takes it; reads the template's file, or takes `kept_template` where that is gone.

        Raises:
            UsageError: when that cannot be read.
        """
        from indexer import profile as counting  # not needed to check a recipe, and slow to import
        from indexer.templates import read_chat_template

        tokenizer = self.tokenizer if isinstance(self.tokenizer, TokenizerModel) else TokenizerModel(file=self.tokenizer)
        rule = ImageRuleModel(name=self.image_rule) if isinstance(self.image_rule, str) else self.image_rule
        special = tokenizer.special_tokens
        built_in = next((known for known in BUILT_IN_TEMPLATES if known == self.template), None)
        is_gone = kept_template is not None and not built_in and not Path(self.template).exists()
        try:
            text = kept_template if is_gone else None if built_in else read_chat_template(self.template)
        except UsageError as error:
            raise UsageError(f"profile {name!r}: template: {error}{self._meant_template()}") from error
        return counting.Profile(
            name=name,
            tokenizer=counting.TokenizerSettings(
                kind=tokenizer.kind,
                pattern=tokenizer.pattern,
                special_tokens=dict(special) if isinstance(special, dict) else list(special),
            ),
            template=counting.TemplateSettings(
                name=built_in or "jinja",
                text=text,
                bos=self.bos,
                eos=self.eos,
                placeholder=self.placeholder,
                content=self.content,
                date=self.date,
                variables=dict(self.variables),
                assistant_tokens=list(self.assistant_tokens),
            ),
            images=counting.ImageSettings(
                rule=rule.name if rule else None,
                parameters=dict(rule.parameters) if rule else {},
                layout=self.image_layout.kind,
                layout_parameters=dict(self.image_layout.parameters),
            ),
            sequence_lengths=sorted(set(self.sequence_lengths)),
        )


def resolve_profile_paths(profile: dict[str, Any], folder: str) -> None:
    """Make the files of a raw profile absolute, in place."""
    tokenizer = profile.get("tokenizer")
    if isinstance(tokenizer, str) and tokenizer:
        profile["tokenizer"] = resolve_path(tokenizer, folder)
    elif isinstance(tokenizer, dict) and isinstance(tokenizer.get("file"), str) and tokenizer["file"]:
        profile["tokenizer"] = tokenizer | {"file": resolve_path(tokenizer["file"], folder)}
    template = profile.get("template")
    if isinstance(template, str) and template and template not in BUILT_IN_TEMPLATES:
        profile["template"] = resolve_path(template, folder)
