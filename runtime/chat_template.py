"""Chat templates: untrusted Jinja programs of a checkpoint, run in Jinja's own sandbox.

The names that a template may use are those that Transformers gives it (``utils/chat_template_utils.py``), so that a
template renders to the same text here. Imported on first use: Jinja comes with the extra ``chat``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template.

    Raises:
        jinja2.TemplateSyntaxError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """Text of a conversation.

        Args:
            messages: each with ``role``, ``content`` and whatever else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            special_tokens: ``bos_token``, ``eos_token`` and so on, for the template to write.

        Raises:
            Exception: whatever the template meets; ``raise_exception`` raises jinja2.TemplateError.
        """
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )


class _GenerationBlock(Extension):
    """``{% generation %}``, with which templates mark the assistant's words for training: here the words alone."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
