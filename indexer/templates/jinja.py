"""Runs a Jinja chat template as transformers runs it: the same sandbox, filters, functions and `{% generation %}` tag.

Three bounds of our own, which no sane template meets: the size of what it writes, the sum of its `range` calls, and no clock.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from indexer.templates.spec import TemplateFailure
from packer.format.errors import UsageError

MAX_CHARACTERS = 64 << 20
MAX_RANGE_ITEMS = 10_000_000
_MAX_DETAIL = 200


class NoDate(Exception):
    """The template asks for the day and the spec names none."""


class Run:
    """One rendering in progress."""

    def __init__(self) -> None:
        self.size = 0
        """Characters written so far."""
        self.num_range_items = 0
        self.generated: list[tuple[int, str]] = []
        """What each generation block wrote, and where."""


_run: ContextVar[Run | None] = ContextVar("bayplan_template_run", default=None)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: its body is what the model is trained to write."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body, lineno=line)

    def note(self, caller: Callable[[], str]) -> str:
        text = caller()
        if (run := _run.get()) is not None:
            run.generated.append((run.size, text))
        return text


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        factors = [side for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes and factors and sizes[0] * factors[0] > MAX_CHARACTERS:
            raise OverflowError(f"{sizes[0]} * {factors[0]} is more than {MAX_CHARACTERS}")
        if operator == "**" and len(factors) == 2 and abs(right) * max(1, left.bit_length()) > 1 << 16:
            raise OverflowError(f"{left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


class JinjaTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, day: datetime.date | None, constants: Mapping[str, Any]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _clock(day), "range": _bounded_range}
        self._constants = dict(constants)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error
        self.has_generation = any(
            isinstance(call.call.node, jinja2.nodes.ExtensionAttribute) for call in tree.find_all(jinja2.nodes.CallBlock)
        )

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans [start, end) that its generation blocks wrote; `prompt` is `add_generation_prompt`.

        Raises:
            TemplateFailure: whatever goes wrong, except NoDate.
        """
        run, blocks = Run(), []
        token = _run.set(run)
        try:
            for block in self._template.generate(
                {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt} | self._constants
            ):
                blocks.append(block)
                run.size += len(block)
                if run.size > MAX_CHARACTERS:
                    raise TemplateFailure(f"the template wrote more than {MAX_CHARACTERS} characters")
        except (TemplateFailure, NoDate):
            raise
        except _Refusal as refusal:
            raise TemplateFailure(f"the template refuses it: {str(refusal)[:_MAX_DETAIL]}") from refusal
        except Exception as error:
            raise TemplateFailure(f"the template failed: {type(error).__name__}: {str(error)[:_MAX_DETAIL]}") from error
        finally:
            _run.reset(token)
        text = "".join(blocks)
        for start, generated in run.generated:
            if not text.startswith(generated, start):
                raise TemplateFailure("a generation block stands inside a macro, a call, a set or another one: its place is lost")
        return text, [(start, start + len(generated)) for start, generated in run.generated if generated]


class _Refusal(jinja2.TemplateError):
    pass


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


def _clock(day: datetime.date | None) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if day is None:
            raise NoDate
        return datetime.datetime.combine(day, datetime.time()).strftime(format)

    return strftime_now


def _bounded_range(*arguments: int) -> range:
    items = jinja2.sandbox.safe_range(*arguments)
    if (run := _run.get()) is not None:
        run.num_range_items += len(items)
        if run.num_range_items > MAX_RANGE_ITEMS:
            raise OverflowError(f"its ranges have more than {MAX_RANGE_ITEMS} items together")
    return items


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
