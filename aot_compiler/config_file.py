"""A configuration's file: YAML and overrides in, a checked :class:`CompileConfig` or all faults at once out, and back.

``config`` has the schema. Here its errors, which are pydantic's, become faults that name the line and quote the key's
documentation.
"""

import difflib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from aot_compiler.config import (
    KEYS,
    SECTIONS,
    CompileConfig,
    Sizes,
    disagreements,
    example_of,
    key_of,
    phrase_of,
)
from aot_compiler.yaml_source import Fault, Node, Place, Unread, one_line, read_yaml, read_yaml_file, show, show_path
from artifacts.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where its relative paths are looked for: the YAML's folder, then the working directory."""

    config: CompileConfig
    path: Path
    search: tuple[Path, ...]


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads and checks a configuration.

    Args:
        path: the YAML file.
        overrides: ``KEY=VALUE`` each, VALUE in YAML: ``buckets.decode=[1,8]``. A value replaces what the file says at
            that key, or stands where the file says nothing; of two for one key the later counts.

    Raises:
        ConfigError: with every fault of the file, in line order, then those of the overrides.
    """
    try:
        search = (path.absolute().parent, Path.cwd())
    except OSError:
        raise ConfigError(
            found="the working directory no longer exists",
            expected="a working directory to look for relative paths in",
            action="change to a folder that exists",
        ) from None
    root, faults = read_yaml_file(path)
    if not faults and (root is None or not isinstance(root.value, dict)):
        fault = Fault(
            place=Place(source=str(path), line=1) if root is None else root.place,
            found="the file is empty" if root is None or root.value is None else f"the top level is {show(root.value)}",
            expected=phrase_of(()).text,
            action="write each key, a colon and its value",
        )
        faults.append(fault)
    values = root.value if root is not None and isinstance(root.value, dict) else None
    for override in overrides:
        faults += _apply_override(values, override)
    if root is not None and values is not None:
        try:
            config = CompileConfig.model_validate(root.plain())
        except ValidationError as error:
            faults += _faults(root, error.errors(include_url=False))
    if faults:
        errors = [fault.error() for fault in sorted(faults, key=lambda fault: fault.place.order)]
        raise errors[0] if len(errors) == 1 else ConfigError(errors)
    return LoadedConfig(config=config, path=path, search=search)


def dump_config(config: CompileConfig) -> str:
    """The configuration as canonical YAML, defaults written out; ``load_config`` of it gives an equal configuration.

    Paths stand as they were given: none is made absolute.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(values, default_flow_style=None, sort_keys=False, allow_unicode=True, width=math.inf)


def resolve_path(value: str, search: Sequence[Path]) -> Path | None:
    """The first file or folder that ``value`` names below one of ``search``; None where there is none.

    An absolute path stands for itself. A leading ``~`` is a character like any other.
    """
    for folder in search:
        candidate = folder / value
        if os.path.exists(candidate):  # unlike Path.exists, False for a name that is too long
            return candidate
    return None


def _apply_override(values: dict[str, Node] | None, override: str) -> list[Fault]:
    """Puts one ``KEY=VALUE`` into the file's values, where there are any, and returns its faults."""
    place = Place(source=f"--set {one_line(override)}")
    name, equals, text = override.partition("=")
    if not equals:
        fault = Fault(
            place=place,
            found="has no =",
            expected="KEY=VALUE, VALUE in YAML",
            action="write it as in --set buckets.decode=[1,8]",
        )
        return [fault]
    known = {show_path(path): path for path in KEYS}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fault = Fault(
            place=place,
            found=f"unknown key {one_line(name) or '(empty)'}",
            expected=f"one of {', '.join(known)}",
            action=f"did you mean {near[0]}?" if near else "remove it",
        )
        return [fault]
    node, faults = read_yaml(text, lambda line, column: place)
    if faults or values is None:
        return faults
    *sections, key = known[name]
    for section in sections:
        node_of_section = values.setdefault(section, Node(value={}, place=place))
        shorthand = SECTIONS[(section,)].shorthand
        if shorthand is not None and isinstance(node_of_section.value, str):
            node_of_section = Node(value={shorthand: node_of_section}, place=node_of_section.place)
            values[section] = node_of_section
        if not isinstance(node_of_section.value, dict):
            return []  # the file's own fault, and found there
        values = node_of_section.value
    values[key] = Node(value=None if node is None else node.value, place=place)
    return []


def _faults(root: Node, errors: Sequence[ErrorDetails]) -> Iterator[Fault]:
    """The faults of single keys, then of the rules between those keys that are sound."""
    misspelt = {_nearest_sibling(error["loc"]) for error in errors if error["type"] == "extra_forbidden"}
    for error in errors:
        # The error without a path is of rules between keys: below they are found with theirs. A key that is absent
        # because its name is misspelt is one mistake, told where the name stands.
        if error["loc"] and misspelt.isdisjoint(_absent(error)):
            yield _fault(root, error)
    at_fault = {error["loc"][:2] for error in errors}
    plain = cast("dict[str, dict[str, Any]]", root.plain())

    def sound(section: str, key: str) -> Any:
        if (section,) in at_fault or (section, key) in at_fault:
            return None
        return plain[section].get(key, SECTIONS[(section,)].model_fields[key].default)

    sizes = Sizes(
        prefill=sound("buckets", "prefill"),
        context=sound("buckets", "context"),
        block_size=sound("kv_cache", "block_size"),
        tokens=sound("kv_cache", "tokens"),
    )
    for rule in disagreements(sizes):
        yield Fault(place=root.place_of(rule.path), found=rule.found, expected=rule.expected, action=rule.action)


def _fault(root: Node, error: ErrorDetails) -> Fault:
    """One of pydantic's errors in our words: it tells what is wrong, the key's documentation what would be right."""
    path, value, kind = error["loc"], error["input"], error["type"]
    place, name = root.place_of(path), show_path(path)
    if kind == "extra_forbidden":
        return Fault(
            place=place,
            found=f"unknown key {name}",
            expected=f"one of {', '.join(_siblings(path))}",
            action=_suggest_key(path),
        )
    phrase = phrase_of(path)
    if kind == "missing":
        return Fault(
            place=place, found=f"key {name} is missing", expected=phrase.text, action=f"add {example_of(key_of(path))}"
        )
    near = difflib.get_close_matches(value, phrase.choices, n=1) if isinstance(value, str) else []
    if isinstance(value, Unread) and value.cure:
        action = value.cure
    elif kind == "string_type" and isinstance(value, bool | int | Unread):
        action = "put it in quotes"
    elif kind == "int_type" and isinstance(value, str) and value.isdecimal():
        action = "remove the quotes"
    elif near:
        action = f"did you mean {near[0]}?"
    else:
        action = f"write it as in {example_of(key_of(path))}"
    wrong_type = kind.endswith("_type") or (kind == "literal_error" and not isinstance(value, str))
    stated = error.get("ctx", {}) if kind == "rule" else {}
    return Fault(
        place=place,
        found=f"{name} {stated.get('found') or f'is {show(value, kind=wrong_type)}'}",
        expected=stated.get("expected") or phrase.text,
        action=stated.get("action") or action,
    )


def _absent(error: ErrorDetails) -> Sequence[tuple[str | int, ...]]:
    """Keys of which any, were it there, would end the error; none where the error is not of absence."""
    if error["type"] == "missing":
        return [error["loc"]]
    absent: Sequence[tuple[str | int, ...]] = error.get("ctx", {}).get("absent", ())
    return absent


def _siblings(path: tuple[str | int, ...]) -> list[str]:
    """The keys of the section that holds ``path``."""
    return list(SECTIONS[key_of(path[:-1])].model_fields)


def _nearest_sibling(path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    """The key that an unknown key's name is like, in the same section."""
    near = difflib.get_close_matches(str(path[-1]), _siblings(path), n=1)
    return (*path[:-1], near[0]) if near else None


def _suggest_key(path: tuple[str | int, ...]) -> str:
    """What to do about an unknown key: a sibling of a like name, or the same name in another section."""
    sibling = _nearest_sibling(path)
    near = [show_path(key) for key in KEYS if key[-1] == path[-1]] if sibling is None else [str(sibling[-1])]
    return f"did you mean {' or '.join(near)}?" if near else "remove it"
