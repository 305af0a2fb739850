"""Typed reading of a Hugging Face ``config.json``: a foreign configuration is translated once, at the border."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from artifacts.errors import UnsupportedModelError

_T = TypeVar("_T", int, float, bool, str)


LARGEST_SIZE = 2**24
"""Largest width, vocabulary or count of heads: none is near it, and shapes above overflow."""


class HfConfig:
    """The keys of one ``config.json``; a missing or mistyped key is an error that names it.

    Args:
        values: the parsed JSON object.
        origin: where it came from, for messages.
    """

    def __init__(self, values: Mapping[str, object], origin: str = "config.json") -> None:
        self.values = values
        self.origin = origin

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        """Value of ``key`` as ``kind``, or None when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UnsupportedModelError(
                found=f"{self.origin}: {key} is {value!r}",
                expected=f"{_NOUNS[kind]}",
                action=f"correct {key}",
            )
        return value

    def get(self, key: str, default: _T) -> _T:
        """Value of ``key`` in the type of ``default``, which stands when the key is absent or null."""
        value = self.optional(key, type(default))
        return default if value is None else value

    def require(self, key: str, kind: type[_T]) -> _T:
        """Value of ``key`` as ``kind``; its absence is an error."""
        value = self.optional(key, kind)
        if value is None:
            raise UnsupportedModelError(
                found=f"{self.origin}: no key {key}",
                expected=_NOUNS[kind],
                action=f"add {key}, or point to a complete Hugging Face config.json",
            )
        return value

    def positive(self, key: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        """An integer from 1 to ``largest`` under ``key``."""
        value = self.require(key, int) if default is None else self.get(key, default)
        if not 1 <= value <= largest:
            raise UnsupportedModelError(
                found=f"{self.origin}: {key} is {shown_integer(value)}",
                expected=f"an integer from 1 to {largest}",
                action=f"correct {key}",
            )
        return value

    def positive_number(self, key: str, default: float, largest: float = math.inf) -> float:
        """A finite number above 0, and at most ``largest``, under ``key``."""
        value = self.get(key, default)
        if not (0 < value <= largest and math.isfinite(value)):
            limit = f", at most {largest:g}" if math.isfinite(largest) else ""
            raise UnsupportedModelError(
                found=f"{self.origin}: {key} is {value:g}",
                expected=f"a finite number above 0{limit}",
                action=f"correct {key}",
            )
        return value

    def choice(self, key: str, default: str, choices: Sequence[str], action: str) -> str:
        """A string under ``key`` that must be one of ``choices``."""
        value = self.get(key, default)
        if value not in choices:
            raise UnsupportedModelError(
                found=f"{self.origin}: {key} is {value!r}", expected=f"one of {', '.join(choices)}", action=action
            )
        return value

    def section(self, key: str) -> "HfConfig | None":
        """The mapping under ``key``, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(
                found=f"{self.origin}: {key} is {value!r}", expected="a mapping", action=f"correct {key}"
            )
        return HfConfig(value, f"{self.origin}: {key}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids under ``key``: an id below ``vocab_size``, a list of them, or nothing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for id_ in ids:
            if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < vocab_size:
                shown = shown_integer(id_) if isinstance(id_, int) else f"{id_!r:.60}"
                raise UnsupportedModelError(
                    found=f"{self.origin}: {key} holds {shown}",
                    expected=f"a token id from 0 to {vocab_size - 1}, a list of such, or null",
                    action=f"correct {key}",
                )
        return tuple(ids)


def shown_integer(value: int) -> str:
    """An integer as a message shows it."""
    return str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"


_NOUNS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
