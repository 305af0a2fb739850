"""Many requests over the fixed entries: admit, prefill, decode together, sample, finish.

A request is admitted when the cache has room for its whole length, prompt and longest output, so that it never has to
be put back; until then it waits, first come, first served.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from artifacts.errors import RequestError, SamplingParamsError
from runtime.batch import CachedSequence, StepBuilder
from runtime.blocks import BlockPool
from runtime.detokenizer import Detokenizer
from runtime.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from runtime.program import Program
from runtime.prompts import Prompt
from runtime.sampling import SampledToken, SamplingParams, sample
from runtime.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Request:
    """One request in the engine."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    detokenizer: Detokenizer | None
    sequence: CachedSequence | None = None
    """None until the request is admitted."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    arrival_time: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None


class Engine:
    """Continuous batching over one program.

    Args:
        program: the loaded layout.
        tokenizer: turns output ids into text; None where the artifact has none.
    """

    def __init__(self, program: Program, tokenizer: Tokenizer | None) -> None:
        self.program = program
        self.tokenizer = tokenizer
        self.builder = StepBuilder(program.entries.values(), program.kv_cache.block_size)
        self.pool = BlockPool(program.kv_cache.blocks, program.kv_cache.block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request whose prompt has been checked.

        Raises:
            SamplingParamsError: stop strings without a tokenizer to find them.
        """
        if params.stop and self.tokenizer is None:
            raise SamplingParamsError(
                found="stop strings for an artifact without a tokenizer",
                expected="stop_token_ids",
                action="pass the ids that end an output",
            )
        detokenizer = Detokenizer(self.tokenizer, stop=params.stop) if self.tokenizer else None
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        self._waiting.append(Request(request_id, prompt, params, seed, detokenizer))

    def run(self) -> Iterator[RequestOutput]:
        """Step until no request is left, yielding each as it finishes."""
        while self._waiting or self._running:
            yield from self.step()

    def step(self) -> Iterator[RequestOutput]:
        """Prefill what can be admitted, then advance every running request by one token."""
        self._admit()
        yield from self._finished()
        for start in range(0, len(self._running), self.builder.largest_decode):
            batch = self._running[start : start + self.builder.largest_decode]
            step = self.builder.decode([_sequence(request) for request in batch])
            logits_BV = self.program.run(step.entry, **step.inputs)
            for request, logits_V in zip(batch, logits_BV, strict=False):
                self._take(request, logits_V)
        yield from self._finished()

    def clear(self) -> None:
        """Forget every request and free its blocks."""
        for request in self._running:
            self.pool.release(_sequence(request).blocks)
        self._running.clear()
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            longest = min(len(request.prompt.token_ids) + request.params.max_tokens, self.builder.longest)
            needed = self.pool.needed(longest)
            if needed > self.pool.free:
                return
            self._waiting.popleft()
            request.sequence = CachedSequence(request.prompt, self.pool.allocate(needed))
            self._running.append(request)
            for step in self.builder.prefill(request.sequence):
                logits_1V = self.program.run(step.entry, **step.inputs)
            self._take(request, logits_1V[0])

    def _take(self, request: Request, logits_V: np.ndarray) -> None:
        """Sample the next token and see whether it is the last. Logits that are not finite end this request alone."""
        sequence, params = _sequence(request), request.params
        try:
            sampled = sample(logits_V, params, seed=request.seed, position=sequence.length)
        except RequestError as error:
            request.finish_reason, request.error = "error", error
            return
        if request.first_token is None:
            request.first_token = time.perf_counter()
        sequence.output_ids.append(sampled.token_id)
        if sampled.logprob is not None:
            request.cumulative_logprob += sampled.logprob
            request.logprobs.append(self._logprobs(sampled))
        if sampled.token_id in self.program.model.eos_token_ids and not params.ignore_eos:
            request.finish_reason = "stop"
        elif sampled.token_id in params.stop_token_ids:
            request.finish_reason, request.stop_reason = "stop", sampled.token_id
        elif request.detokenizer and (stop_string := request.detokenizer.push(sampled.token_id)) is not None:
            request.finish_reason, request.stop_reason = "stop", stop_string
        elif len(sequence.output_ids) >= params.max_tokens or sequence.length >= self.builder.longest:
            request.finish_reason = "length"

    def _logprobs(self, sampled: SampledToken) -> dict[int, Logprob]:
        return {
            token_id: Logprob(
                logprob=ranked.logprob,
                rank=ranked.rank,
                decoded_token=self.tokenizer.decode([token_id], skip_special_tokens=False) if self.tokenizer else None,
            )
            for token_id, ranked in sampled.top_logprobs.items()
        }

    def _finished(self) -> Iterator[RequestOutput]:
        """Take out the requests that have ended, and free their blocks before anyone sees an output."""
        ended = [request for request in self._running if request.finish_reason]
        self._running = [request for request in self._running if not request.finish_reason]
        for request in ended:
            self.pool.release(_sequence(request).blocks)
        for request in ended:
            yield _output(request)


def _sequence(request: Request) -> CachedSequence:
    assert request.sequence is not None, "not admitted"
    return request.sequence


def _output(request: Request) -> RequestOutput:
    detokenizer, output_ids = request.detokenizer, _sequence(request).output_ids
    text, stop_string = "", None
    if detokenizer is not None:
        stop_string = detokenizer.finish()
        text = detokenizer.text
    if stop_string is not None and request.finish_reason == "length":
        request.finish_reason, request.stop_reason = "stop", stop_string  # it was held back until the end
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=list(output_ids),
        cumulative_logprob=None if request.params.logprobs is None else request.cumulative_logprob,
        logprobs=None if request.params.logprobs is None else request.logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=request.prompt.reported_ids,
        outputs=[completion],
        finished=True,
        error=request.error,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            time_to_first_token=None if request.first_token is None else request.first_token - request.started,
            total_time=time.perf_counter() - request.started,
            prefill_tokens=len(request.prompt.token_ids),
            output_tokens=len(output_ids),
        ),
    )
