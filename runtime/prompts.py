"""Every prompt is checked here, whether it comes from Python, a file or the command line.

A prompt is text, token ids, embedding rows, or ids and rows mixed. What is accepted is a copy, so that the caller may
go on to change theirs; what is refused for its shape, dtype or kind has not been copied.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts.errors import PromptError
from runtime.host_array import NotHostArrayError, borrow_array, declared_shape
from runtime.prompt_embeds import borrow_rows, cast_rows
from runtime.tokenizer import Tokenizer
from runtime.wording import shown

_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids")
_FORMS = ({"prompt"}, {"prompt_token_ids"}, {"prompt_embeds"}, set(_KEYS[1:]))
_RULE = "prompt, prompt_token_ids, prompt_embeds, or the last two with prompt_is_token_ids"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A checked prompt of n rows. The arrays are its own, and read-only."""

    token_ids: np.ndarray
    """int32 [n]; 0 where the row is an embedding."""
    is_token_ids: np.ndarray
    """bool [n]; True where the row is a token id."""
    embeds: np.ndarray | None
    """Model dtype [n, H], zeros where the row is a token id; None where every row is one."""
    text: str | None
    """The text, where the prompt came as one."""

    def __post_init__(self) -> None:
        for array in (self.token_ids, self.is_token_ids, self.embeds):
            if array is not None:
                array.flags.writeable = False

    @property
    def reported_ids(self) -> list[int | None]:
        """For each row its token id, or None where the row is an embedding: no number stands for "no id"."""
        rows = zip(self.token_ids.tolist(), self.is_token_ids.tolist(), strict=True)
        return [token_id if is_id else None for token_id, is_id in rows]


def parse_prompt(
    prompt: object,
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: np.dtype,
    tokenizer: Tokenizer | None,
    max_length: int,
) -> Prompt:
    """Check a prompt and bring it into the form from which steps are filled.

    Args:
        prompt: a string; token ids, as a list of integers or an integer array [n]; or a mapping of one of these:
            ``prompt``, a string;
            ``prompt_token_ids``, as above;
            ``prompt_embeds``, a float array [n, H] or [1, n, H] (see ``borrow_rows``): output of the model's own
            embedding, any embedding multiplier already in it;
            the last two with ``prompt_is_token_ids``, bools [n], all of one length: True takes the row's id, False its
            embedding. What the mask leaves out is never read, be it an id out of range or a row of NaN.
        hidden_size: H.
        vocab_size: ids are below it.
        dtype: model dtype; embeddings are cast to it.
        tokenizer: for text; None where the artifact has none.
        max_length: the longest sequence; the prompt must leave room in it for one generated token.

    Raises:
        PromptError: the prompt is empty, too long, has unknown keys, ids out of range or a mask that does not fit.
        PromptEmbedsError: embeddings of a wrong shape, dtype or kind, or that are not finite in the model dtype.
    """
    given = _by_key(prompt)
    if "prompt" in given:
        text = _text(given["prompt"])
        ids: Sequence[object] | np.ndarray = _encode(text, tokenizer)
        return _prompt_of_ids(ids, "the prompt's text", vocab_size, max_length, text)
    if "prompt_embeds" not in given:
        ids = _integers(given["prompt_token_ids"])
        return _prompt_of_ids(ids, "prompt_token_ids", vocab_size, max_length, None)

    rows = borrow_rows(given["prompt_embeds"], hidden_size, lambda count: _check_length(count, max_length))
    token_ids = np.zeros(len(rows), np.int32)
    is_token_ids = np.zeros(len(rows), np.bool_)
    if "prompt_is_token_ids" in given:
        ids, mask = _integers(given["prompt_token_ids"]), _booleans(given["prompt_is_token_ids"])
        if not len(ids) == len(mask) == len(rows):
            raise PromptError(
                found=f"{len(ids)} prompt_token_ids, {len(rows)} prompt_embeds and {len(mask)} prompt_is_token_ids",
                expected="one of each for every row of the prompt",
                action="fill ids with 0 and rows with zeros where the mask takes the other",
            )
        is_token_ids[:] = _checked_mask(mask)
        token_ids[is_token_ids] = _checked_ids(ids, is_token_ids, "prompt_token_ids", vocab_size)
    embeds = None if is_token_ids.all() else cast_rows(rows, ~is_token_ids, dtype)
    return Prompt(token_ids=token_ids, is_token_ids=is_token_ids, embeds=embeds, text=None)


def parse_token_ids(token_ids: object, *, vocab_size: int) -> np.ndarray:
    """Check token ids, as a list of integers or an integer array [n], and return them as int32 [n]; n may be 0.

    Raises:
        PromptError: not integers, or out of range.
    """
    action = "encode text with the model's own tokenizer first"
    ids = _listed("token_ids", token_ids, "iu", "a list of integers or an integer array [n]", action)
    return np.array(_checked_ids(ids, np.ones(len(ids), np.bool_), "token_ids", vocab_size), np.int32)


def _by_key(prompt: object) -> Mapping[str, object]:
    """What the prompt gives, by the keys of the mapping that it is or stands for."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, Sequence) or declared_shape(prompt) is not None:
            return {"prompt_token_ids": prompt}
        raise PromptError(
            found=f"a prompt of type {type(prompt).__name__}",
            expected=f"a string, a list of token ids, or a mapping of {_RULE}",
            action="pass one of these",
        )
    for key in prompt:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            raise PromptError(
                found=f"unknown key {key if str(key).isidentifier() else shown(key)} in a prompt",
                expected=_RULE,
                action=f"did you mean {near[0]}?" if near else "remove it",
            )
    if set(prompt) not in _FORMS:
        raise PromptError(
            found=f"a prompt with {', '.join(key for key in _KEYS if key in prompt) or 'no keys'}",
            expected=_RULE,
            action="pass all keys of one of these forms and no others",
        )
    return prompt


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(
            found=f"prompt is of type {type(value).__name__}",
            expected="a string",
            action="pass ids as prompt_token_ids, embeddings as prompt_embeds",
        )
    if not value:
        raise _empty()
    return value


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise PromptError(
            found="a prompt of text for an artifact without a tokenizer",
            expected="prompt_token_ids or prompt_embeds",
            action="encode the text with the model's own tokenizer and pass the ids",
        )
    return tokenizer.encode(text)


def _prompt_of_ids(
    ids: Sequence[object] | np.ndarray, origin: str, vocab_size: int, max_length: int, text: str | None
) -> Prompt:
    _check_length(len(ids), max_length)
    is_token_ids = np.ones(len(ids), np.bool_)
    token_ids = np.array(_checked_ids(ids, is_token_ids, origin, vocab_size), np.int32)
    return Prompt(token_ids=token_ids, is_token_ids=is_token_ids, embeds=None, text=text)


def _check_length(length: int, max_length: int) -> None:
    if length == 0:
        raise _empty()
    if length >= max_length:
        raise PromptError(
            found=f"a prompt of {length} tokens",
            expected=f"at most {max_length - 1}, as a sequence holds {max_length} and at least one is generated",
            action="shorten the prompt, or compile a larger context bucket",
        )


def _empty() -> PromptError:
    return PromptError(
        found="an empty prompt", expected="one token or more", action="pass text, token ids or embeddings"
    )


def _integers(value: object) -> Sequence[object] | np.ndarray:
    action = "pass embeddings as prompt_embeds and text as prompt"
    return _listed("prompt_token_ids", value, "iu", "a list of integers or an integer array [n]", action)


def _booleans(value: object) -> Sequence[object] | np.ndarray:
    action = "pass True where a row is a token id"
    return _listed("prompt_is_token_ids", value, "b", "a list of bools or a bool array [n]", action)


def _listed(name: str, value: object, kinds: str, rule: str, action: str) -> Sequence[object] | np.ndarray:
    """A sequence, whose members are checked once its length is, or a flat array of these kinds of dtype."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    try:
        array = borrow_array(value)
    except NotHostArrayError as error:
        raise PromptError(found=f"{name} is {error}", expected=rule, action=action) from error
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise PromptError(found=f"{name} is {array.dtype.name}{list(array.shape)}", expected=rule, action=action)
    return array


def _checked_mask(mask: Sequence[object] | np.ndarray) -> list[bool]:
    checked = []
    for row, member in enumerate(_members(mask)):
        if not isinstance(member, bool | np.bool_):
            raise PromptError(
                found=f"prompt_is_token_ids holds {shown(member)} at row {row}",
                expected="bools",
                action="pass True where a row is a token id",
            )
        checked.append(bool(member))
    return checked


def _checked_ids(
    ids: Sequence[object] | np.ndarray, is_token_ids: np.ndarray, origin: str, vocab_size: int
) -> list[int]:
    """The ids at the rows that are token ids."""
    checked = []
    for row, (member, is_id) in enumerate(zip(_members(ids), is_token_ids.tolist(), strict=True)):
        if not is_id:
            continue
        if isinstance(member, bool) or not isinstance(member, int | np.integer) or not 0 <= member < vocab_size:
            raise PromptError(
                found=f"{origin} holds {shown(member)} at row {row}",
                expected=f"integers from 0 to {vocab_size - 1}",
                action="take the ids from this model's own tokenizer",
            )
        checked.append(int(member))
    return checked


def _members(values: Sequence[object] | np.ndarray) -> Sequence[object]:
    return values.tolist() if isinstance(values, np.ndarray) else values
