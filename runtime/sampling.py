"""How the next token is chosen: the parameters of a request, checked once, and the choice itself.

Names and defaults are vLLM's, as is the order temperature, top-k, top-p. Tokens are ranked by logit, and by id where
logits are equal: ``top_k=1`` is greedy, and nothing depends on how a partial sort happens to break ties.
"""

import difflib
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from artifacts.errors import RequestError, SamplingParamsError
from runtime.wording import shown

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's ``_SAMPLING_EPS``): dividing by them would overflow float32."""

_ANY = 2**63 - 1
_SMALLEST, _LARGEST = 5e-324, sys.float_info.max  # the float64 next to 0, and the last before infinity
_HOTTEST = 1e38  # as uniform as float32 can be; beyond its range -inf / inf would be NaN
_FIRST_GUESS = 64  # top-p rarely keeps more tokens than this, and a partial sort of so few is cheap
_GROWTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What one request wants of its output. Every value is checked when the object is made.

    Raises:
        SamplingParamsError: a value out of its range, or a keyword that does not exist.
    """

    n: int = 1
    """Outputs of one request: 1."""
    temperature: float = 1.0
    """Divides the logits; 0 chooses the best token."""
    top_k: int = 0
    """Choose among so many best tokens; 0 or -1: among all."""
    top_p: float = 1.0
    """Choose among the fewest best tokens whose probabilities, after top-k, sum to this or more."""
    seed: int | None = None
    """Makes the output repeatable, whatever else is in the batch; None: a new seed for each request."""
    max_tokens: int = 16
    """Generate at most so many tokens."""
    stop: Sequence[str] = ()
    """End where this string, or one of these, appears; the text ends before it. Kept as a tuple."""
    stop_token_ids: Collection[int] = ()
    """End with one of these tokens. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    logprobs: int | None = None
    """Report so many best tokens of each step and the chosen one; None reports nothing."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown keywords before the generated ``__init__`` answers them with a bare TypeError."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise SamplingParamsError(
                    found=f"unknown sampling parameter {name}",
                    expected=f"one of {', '.join(known)}",
                    action=f"did you mean {near[0]}?" if near else "remove it",
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        checked = {
            "n": _integer("n", self.n, "1", 1, 1, "send the request once for each output"),
            "temperature": _number("temperature", self.temperature, "a number >= 0", 0.0, _LARGEST, "0 is greedy"),
            "top_k": _integer("top_k", self.top_k, "an integer >= -1", -1, _ANY, "0 or -1 choose among all tokens"),
            "top_p": _number("top_p", self.top_p, "a number above 0, at most 1", _SMALLEST, 1.0, "1 keeps all tokens"),
            "seed": _optional("seed", self.seed, "an integer from 0 to 2**64 - 1", 2**64 - 1, "a new seed"),
            "max_tokens": _integer(
                "max_tokens", self.max_tokens, "an integer >= 1", 1, _ANY, "ask for a token or more"
            ),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "logprobs": _optional("logprobs", self.logprobs, "an integer >= 0", _ANY, "none"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the best token is chosen without a draw."""
        return self.temperature < GREEDY_BELOW


def _integer(name: str, value: object, rule: str, least: int, most: int, action: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise SamplingParamsError(found=f"{name} is {shown(value)}", expected=rule, action=action)
    return int(value)


def _optional(name: str, value: object, rule: str, most: int, absent: str) -> int | None:
    return None if value is None else _integer(name, value, f"None or {rule}", 0, most, f"None gives {absent}")


def _number(name: str, value: object, rule: str, least: float, most: float, action: str) -> float:
    number = value.item() if isinstance(value, np.integer | np.floating) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
        raise SamplingParamsError(found=f"{name} is {shown(value)}", expected=rule, action=action)
    return float(number)


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise SamplingParamsError(
            found=f"{name} is {shown(value)}", expected="True or False", action="write one of them"
        )
    return bool(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = _members("stop", (value,) if isinstance(value, str) else value, "a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise SamplingParamsError(
                found=f"stop holds {shown(string)}",
                expected="strings of one character or more",
                action="remove it; token ids go to stop_token_ids",
            )
    return tuple(str(string) for string in strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    members = _members("stop_token_ids", value, "a list of token ids")
    return tuple(
        _integer("a member of stop_token_ids", member, "a token id", 0, 2**31 - 1, "remove it") for member in members
    )


def _members(name: str, value: object, rule: str) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SamplingParamsError(found=f"{name} is {shown(value)}", expected=rule, action="write it as a list")
    return tuple(value)


class RankedLogprob(NamedTuple):
    """One token of a step's distribution."""

    logprob: float
    """Natural logarithm of the probability before temperature, top-k and top-p."""
    rank: int
    """1 for the best token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """The token that a step chose."""

    token_id: int
    logprob: float | None
    """None unless the request asks for logprobs, which cost a pass over the vocabulary."""
    top_logprobs: Mapping[int, RankedLogprob]
    """By token id: the best tokens, best first, then the chosen one where it is not among them."""


def sample(logits_V: np.ndarray, params: SamplingParams, *, seed: int, position: int) -> SampledToken:
    """Choose one token.

    The draw comes from a counter-based generator (Philox 4x64, Salmon et al. 2011) whose key is the request's seed and
    whose counter is the position: it depends on nothing else, and leaves no state between steps.

    Args:
        logits_V: float32 [V]; -inf excludes a token.
        params: of the request.
        seed: of the request, 0 to 2**64 - 1; ``params.seed`` or, where that is None, one that the caller drew.
        position: of the token to choose, in its sequence.

    Raises:
        RequestError: the logits hold NaN or +inf, or are all -inf.
    """
    best = int(np.argmax(logits_V))  # NaN counts as the largest, equal logits give the lowest index
    if not np.isfinite(logits_V[best]):
        raise RequestError(
            found=f"the logits of position {position} have the maximum {logits_V[best]}",
            expected="finite logits",
            action="check the prompt embeddings, the checkpoint and the model dtype for values out of range",
        )
    token_id = best if params.greedy else _draw(logits_V, params, _uniform(seed, position))
    if params.logprobs is None:
        return SampledToken(token_id=token_id, logprob=None, top_logprobs=MappingProxyType({}))
    return _with_logprobs(token_id, logits_V, logits_V[best], params.logprobs)


def _uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1) from the 53 high bits of the counter's first word: the same in every release of numpy."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(word) >> 11) * 2.0**-53


def _draw(logits_V: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """Invert the cumulative distribution, over ids in rising order so that filters that keep all change nothing."""
    kept_K = best_ids(logits_V, params.top_k) if 0 < params.top_k < len(logits_V) else None
    temperature = np.float32(min(params.temperature, _HOTTEST))
    with np.errstate(over="ignore", under="ignore"):  # a difference may reach -inf, whose weight is 0
        logits_K = logits_V if kept_K is None else logits_V[kept_K]
        weights_K = np.exp((logits_K - logits_K.max()) / temperature)
    if params.top_p < 1:
        kept_K, weights_K = _nucleus(logits_V, kept_K, weights_K, params.top_p)
    if kept_K is not None:
        rising = np.argsort(kept_K)
        kept_K, weights_K = kept_K[rising], weights_K[rising]
    cumulative_K = np.cumsum(weights_K, dtype=np.float64)
    # The total is at least 1, the best token's weight, and uniform at most 1 - 2**-53: the product is below the total.
    index = int(np.searchsorted(cumulative_K, uniform * cumulative_K[-1], side="right"))
    return index if kept_K is None else int(kept_K[index])


def _nucleus(
    logits_V: np.ndarray, ranked_K: np.ndarray | None, weights_K: np.ndarray, top_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The shortest run of best tokens that holds ``top_p`` of the weight: ids and weights, best first.

    Without ranks from top-k, ranks so many best tokens as it takes, in growing steps, and not the whole vocabulary.
    """
    wanted = top_p * float(weights_K.sum(dtype=np.float64))
    count = _FIRST_GUESS
    while True:
        if ranked_K is None:
            ids = best_ids(logits_V, count)
            weights = weights_K[ids]
        else:
            ids, weights = ranked_K, weights_K
        cumulative = np.cumsum(weights, dtype=np.float64)
        if cumulative[-1] >= wanted or len(ids) == len(weights_K):
            kept = int(np.searchsorted(cumulative, wanted)) + 1  # the token that reaches the sum is kept
            return ids[:kept], weights[:kept]
        count *= _GROWTH


def best_ids(logits_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest logits, best first, equal logits by id: int64 [min(count, V)]."""
    smallest = np.partition(logits_V, -count)[-count] if count < len(logits_V) else -np.inf
    ids = np.flatnonzero(logits_V >= smallest)  # with all that equal the smallest: the stable sort puts low ids first
    return ids[np.argsort(-logits_V[ids], kind="stable")[:count]]


def _with_logprobs(token_id: int, logits_V: np.ndarray, largest: np.float32, count: int) -> SampledToken:
    with np.errstate(over="ignore", under="ignore"):
        total = np.exp(logits_V - largest).sum(dtype=np.float64)
    log_total = float(largest) + math.log(total)
    chosen = logits_V[token_id]
    rank = 1 + np.count_nonzero(logits_V > chosen) + np.count_nonzero(logits_V[:token_id] == chosen)
    ids = best_ids(logits_V, count).tolist() if count else []
    top = {best: RankedLogprob(float(logits_V[best]) - log_total, place) for place, best in enumerate(ids, start=1)}
    logprob = float(chosen) - log_total
    top.setdefault(token_id, RankedLogprob(logprob, int(rank)))
    return SampledToken(token_id=token_id, logprob=logprob, top_logprobs=MappingProxyType(top))
