"""What a request gives back. Names and meanings are vLLM's."""

from dataclasses import dataclass
from typing import Literal

from artifacts.errors import RequestError

FinishReason = Literal["stop", "length", "error"]
"""``stop``: an end-of-sequence token, stop token or stop string; ``length``: ``max_tokens`` or the longest sequence;
``error``: the request alone failed, and ``RequestOutput.error`` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """One token of a step's distribution."""

    logprob: float
    """Natural logarithm of the probability before temperature, top-k and top-p."""
    rank: int
    """1 for the best token."""
    decoded_token: str | None
    """The token's text alone; None where the artifact has no tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    """Which of the request's outputs: 0, as there is one."""
    text: str
    """The decoded ``token_ids`` without special tokens, cut before a stop string; empty where there is no tokenizer."""
    token_ids: list[int]
    """Everything generated, the tokens that ended it included."""
    cumulative_logprob: float | None
    """Sum of the chosen tokens' log-probabilities; None unless the request asks for logprobs."""
    logprobs: list[dict[int, Logprob]] | None
    """For each of ``token_ids``: the best tokens and the chosen one, by id; None unless the request asks for them."""
    finish_reason: FinishReason | None
    """None while the request runs."""
    stop_reason: int | str | None
    """The stop token or the stop string that ended the output; None for the model's own end-of-sequence tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """When things happened, and how much was computed. Times are in seconds."""

    arrival_time: float
    """Unix time at which the request was submitted."""
    time_to_first_token: float | None
    """From arrival to the first generated token; None before it."""
    total_time: float
    """From arrival to the end."""
    prefill_tokens: int
    """Prompt rows, ids and embeddings alike."""
    output_tokens: int
    """Generated tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A request and what came of it."""

    request_id: str
    prompt: str | None
    """The prompt's text where it was given as text."""
    prompt_token_ids: list[int | None]
    """One for each prompt row: its token id, or None where the row is an embedding."""
    outputs: list[CompletionOutput]
    finished: bool
    error: RequestError | None
    """What ended the request early, where something did; its neighbours were not affected."""
    metrics: RequestMetrics
