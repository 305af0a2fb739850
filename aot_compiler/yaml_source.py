"""YAML with positions: every value knows the file and line, or the ``--set`` override, that it came from.

Reading never stops at what it can step over (a duplicate key, an alias), so that one run reports all faults of a file.
Only what ``yaml.SafeLoader`` resolves is understood; nothing here can make an object of another class. Aliases, tags of
other kinds, dates, floats and integers such as ``010`` (octal in YAML 1.1), ``0x20``, ``1_000`` and ``1:30`` (base 60)
become an :class:`Unread`, which no key accepts: a file that says one number to a person and another to a parser is
refused rather than guessed at.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import yaml

from artifacts.errors import ConfigError

LARGEST_FILE = 64 * 1024
"""Bytes of the largest file that is read: a configuration is a page of text, a checkpoint named by mistake is not."""

DEEPEST_NESTING = 16
"""Levels of mappings and lists; the parser calls itself once a level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value was written: a line of a file, or an override, which has no lines."""

    source: str
    line: int | None = None
    column: int = 0

    def __str__(self) -> str:
        name = one_line(self.source, limit=1000)
        return name if self.line is None else f"{name}:{self.line}"

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts the places of one file by line, then the places without a line."""
        return self.line is None, self.line or 0, self.column


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing wrong with the text at ``place``; the other fields are those of :class:`ConfigError`."""

    place: Place
    found: str
    expected: str
    action: str

    def error(self) -> ConfigError:
        """The fault as the error that a user meets, ``<place>: <found>; expected <expected>; <action>``."""
        return ConfigError(found=f"{self.place}: {self.found}", expected=self.expected, action=self.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A value that no key takes, kept as written so that a fault can show it; ``cure`` is what to do about it."""

    text: str
    kind: str
    cure: str = ""


Scalar: TypeAlias = str | int | bool | Unread | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A value and its place; the place of a mapping's value is that of its key."""

    value: "Scalar | list[Node] | dict[str, Node]"
    place: Place

    def plain(self) -> object:
        """The value without places: nested dicts and lists of scalars."""
        match self.value:
            case dict():
                return {key: child.plain() for key, child in self.value.items()}
            case list():
                return [child.plain() for child in self.value]
            case scalar:
                return scalar

    def place_of(self, path: Sequence[str | int]) -> Place:
        """The place of the value at ``path``, or of its nearest ancestor that is there."""
        node = self
        for step in path:
            match node.value:
                case dict() if isinstance(step, str) and step in node.value:
                    node = node.value[step]
                case list() if isinstance(step, int) and step < len(node.value):
                    node = node.value[step]
                case _:
                    break
        return node.place


def read_yaml_file(path: Path) -> tuple[Node | None, list[Fault]]:
    """Reads a YAML file; see :func:`read_yaml`. A file that cannot be read is a fault without a line."""
    place = Place(source=str(path))
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return None, [Fault(place=place, found="no such file", expected="a YAML file", action="check the path")]
    except IsADirectoryError:
        return None, [Fault(place=place, found="is a folder", expected="a YAML file", action="name the file inside it")]
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fault = Fault(
            place=place,
            found=f"cannot be read ({reason})",
            expected="a YAML file",
            action="check the path and its permissions",
        )
        return None, [fault]
    if len(content) > LARGEST_FILE:
        fault = Fault(
            place=place,
            found=f"holds more than {LARGEST_FILE} bytes",
            expected=f"a YAML file of at most {LARGEST_FILE} bytes",
            action="check that the path is that of the configuration",
        )
        return None, [fault]
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = Fault(
            place=Place(source=str(path), line=content.count(b"\n", 0, error.start) + 1),
            found=f"byte 0x{content[error.start]:02x} is not UTF-8",
            expected="a YAML file in UTF-8",
            action="save the file as UTF-8",
        )
        return None, [fault]
    return read_yaml(text, lambda line, column: Place(source=str(path), line=line, column=column))


def read_yaml(text: str, place: Callable[[int, int], Place]) -> tuple[Node | None, list[Fault]]:
    """Reads one YAML document.

    Args:
        text: the document.
        place: makes a place from a line, from 1, and a column, from 0.

    Returns:
        The document and its faults. The document is None where the text holds nothing, or is not YAML, which is then
        the only fault. Of a key written twice the first value counts.
    """
    not_yaml = partial(Fault, expected="valid YAML", action="correct the text there")
    # PyYAML refuses these characters too, but tells an offset in place of the line.
    if (odd := yaml.reader.Reader.NON_PRINTABLE.search(text)) is not None:
        line_start = text.rfind("\n", 0, odd.start()) + 1
        where = place(text.count("\n", 0, odd.start()) + 1, odd.start() - line_start)
        return None, [not_yaml(place=where, found=f"character U+{ord(odd[0]):04X} is not allowed in YAML")]
    composer = _Composer(text)
    try:
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place(mark.line + 1, mark.column) if mark else place(composer.line + 1, composer.column)
        return None, [not_yaml(place=where, found=f"not YAML: {_explain(error)}")]
    except (ValueError, OverflowError):
        # PyYAML lets int() and chr() fail on a %YAML version of thousands of digits and on the escape "\UFFFFFFFF".
        where = place(composer.line + 1, composer.column)
        return None, [not_yaml(place=where, found="not YAML: a number or an escape is out of range")]
    builder = _Builder(place=place)
    return (None if root is None else builder.build(root, root.start_mark, ())), builder.faults


def show(value: object, *, kind: bool = True) -> str:
    """A value as a fault shows it, on one line: ``"32" (string)``, ``true (boolean)``, ``a list``.

    Args:
        value: what stood in the file.
        kind: whether to name the type of a string or integer, for faults where the type is what is wrong.
    """
    match value:
        case Unread():
            return f"{one_line(value.text)} ({value.kind})"
        case bool():
            return f"{str(value).lower()} (boolean)"
        case int():
            digits = one_line(str(value))
            return f"{digits} (integer)" if kind else digits
        case str():
            quoted = one_line(json.dumps(value, ensure_ascii=False))
            return f"{quoted} (string)" if kind else quoted
        case None:
            return "empty (null)"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case _:
            return "a mapping"


def show_path(path: Sequence[str | int]) -> str:
    """The path of a key or list item as faults name it: ``buckets.decode[1]``, items counted from 0."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            plain = re.fullmatch(r"[\w-]+", step, flags=re.ASCII) is not None
            text += ("." if text else "") + one_line(step if plain else json.dumps(step, ensure_ascii=False))
    return text


def one_line(text: str, *, limit: int = 80) -> str:
    """``text`` cut to ``limit`` characters, with what a terminal cannot show written as escapes."""
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_STANDARD = "tag:yaml.org,2002:"
_ALIAS = "alias"

_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,3999})")  # past 4300 digits, int() raises
_KINDS = {
    _STANDARD + "bool": "boolean",
    _STANDARD + "int": "integer not in plain decimal",
    _STANDARD + "float": "float",
    _STANDARD + "timestamp": "date",
}


class _Composer(yaml.SafeLoader):
    """SafeLoader's composer without aliases, which can make a page of text stand for gigabytes, nor endless nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            # The stubs allow for the C parser's marks, which this pure Python parser never makes.
            return yaml.ScalarNode(_ALIAS, f"*{event.anchor}", event.start_mark)  # type: ignore[arg-type]
        if self._depth == DEEPEST_NESTING:
            problem = f"more than {DEEPEST_NESTING} levels of mappings and lists"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _explain(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words, with the line where the construct began if that is another one."""
    problem = one_line(error.problem or "a construct is not closed", limit=200)
    if error.context is None:
        return problem
    context = one_line(error.context, limit=200)
    began, ended = error.context_mark, error.problem_mark
    if began is not None and ended is not None and began.line != ended.line:
        context += f" that begins on line {began.line + 1}"
    return f"{context}, {problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Builder:
    """Turns PyYAML's nodes into ours, collecting the faults of keys."""

    place: Callable[[int, int], Place]
    faults: list[Fault] = field(default_factory=list)

    def build(self, node: yaml.Node, mark: yaml.Mark, path: tuple[str | int, ...]) -> Node:
        """The node at ``path``, placed at ``mark``."""
        here = self.place(mark.line + 1, mark.column)
        match node:
            case yaml.MappingNode(tag=yaml.Loader.DEFAULT_MAPPING_TAG):
                return Node(value=self._mapping(node, path), place=here)
            case yaml.SequenceNode(tag=yaml.Loader.DEFAULT_SEQUENCE_TAG):
                items = [self.build(item, item.start_mark, (*path, i)) for i, item in enumerate(node.value)]
                return Node(value=items, place=here)
            case yaml.CollectionNode():
                return Node(value=_tagged(node.tag), place=here)
            case _:
                return Node(value=_scalar(node.tag, node.value), place=here)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Node]:
        children: dict[str, Node] = {}
        for key, child in node.value:
            if isinstance(key, yaml.ScalarNode) and _is_unicode(key.value) and key.value not in children:
                children[key.value] = self.build(child, key.start_mark, (*path, key.value))
            else:
                place = self.place(key.start_mark.line + 1, key.start_mark.column)
                self.faults.append(_key_fault(key, place, path, children))
        return children


def _key_fault(key: yaml.Node, place: Place, path: tuple[str | int, ...], children: dict[str, Node]) -> Fault:
    expected, action = "a word as key", "write the key as one word"
    if not isinstance(key, yaml.ScalarNode):
        found = "a list or a mapping stands as a key"
    elif key.value in children:
        first = children[key.value].place.line
        found = f"key {show_path((*path, key.value))} is written twice"
        if first is not None:
            found += f", first on line {first}"
        expected, action = "each key once", "remove one of the two"
    else:
        found = f"key {show_path((*path, key.value))} is not Unicode"
    return Fault(place=place, found=found, expected=expected, action=action)


def _scalar(tag: str, text: str) -> Scalar:
    match tag.removeprefix(_STANDARD):
        case "str" if _is_unicode(text):
            return text
        case "str":
            return Unread(text=text, kind="not Unicode", cure="remove the escape of half a character")
        case "int" if _DECIMAL.fullmatch(text):
            return int(text)
        case "bool" if text in ("true", "false"):
            return text == "true"
        case "null" if text in ("", "~", "null", "Null", "NULL"):
            return None
    if tag == _ALIAS:
        return Unread(text=text, kind="alias", cure="write the value itself in place of the alias")
    if tag in _KINDS:
        return Unread(text=text, kind=_KINDS[tag])
    return _tagged(tag)


def _is_unicode(text: str) -> bool:
    r"""False for half a surrogate pair, which the escape ``"\ud800"`` makes and no encoding can write."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _tagged(tag: str) -> Unread:
    return Unread(text=tag.replace(_STANDARD, "!!"), kind="tag", cure="write a plain value without a tag")
