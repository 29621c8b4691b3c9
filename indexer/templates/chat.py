"""Conversations through a Jinja chat template: write the messages, render once, find the loss, split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indexer.segments import Segment
from indexer.templates.document import DocumentTemplate
from indexer.templates.jinja import JinjaTemplate, NoDate
from indexer.templates.loss import prefix_spans
from indexer.templates.messages import MessageWriter, Written
from indexer.templates.spec import TemplateFailure
from indexer.templates.splitter import Splitter


class ChatTemplate:
    """Records with `messages` go through the template; records with `content` are documents in every profile."""

    def __init__(
        self, template: JinjaTemplate, writer: MessageWriter, splitter: Splitter, documents: DocumentTemplate, fingerprint: str
    ) -> None:
        self._template = template
        self._writer = writer
        self._splitter = splitter
        self._documents = documents
        self.fingerprint = fingerprint

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        if "content" in record:
            return self._documents.segments(record)
        written = self._writer.write(record)
        try:
            rendered, spans = self._render(written)
        except NoDate as error:
            raise TemplateFailure("the template asks strftime_now for the day: say which with `date: YYYY-MM-DD`") from error
        return self._splitter.split(rendered, spans, written.images, written.marker)

    def _render(self, written: Written) -> tuple[str, list[tuple[int, int]]]:
        def render(messages: Sequence[Any], *, prompt: bool) -> str:
            return self._template.render(list(messages), tools=written.tools, prompt=prompt)[0]

        rendered, spans = self._template.render(written.messages, tools=written.tools)
        if not self._template.has_generation:
            spans = prefix_spans(render, written.messages, rendered, self._splitter)
        return rendered, spans
