"""``LLM``: prompts in, tokens out. The way into the runtime: load, check prompts, run the engine, return outputs."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from artifacts.errors import PromptError, SamplingParamsError
from artifacts.signature import DTYPES
from runtime.engine import Engine
from runtime.outputs import RequestOutput
from runtime.program import load
from runtime.prompts import Prompt, parse_prompt, parse_token_ids
from runtime.sampling import SamplingParams
from runtime.tokenizer import Tokenizer


class LLM:
    """A loaded artifact, ready to generate. Calls from several threads take turns.

    Args:
        path: the artifact's folder.
        layout: name of the layout; may be left out where there is only one.
        preload: load every program before returning, and not on first need.
        warmup: preload, then run one dummy step of each entry.
        verify: read every file and compare digests first.
        threads: size of XLA's thread pool; None takes the cores that this process may use.

    Raises:
        ArtifactError: the artifact is missing, unfinished, corrupt, or for another machine.
        LayoutNotFoundError: it does not hold the layout.
    """

    def __init__(
        self,
        path: str | Path,
        layout: str | None = None,
        *,
        preload: bool = False,
        warmup: bool = False,
        verify: bool = False,
        threads: int | None = None,
    ) -> None:
        self.program = load(path, layout, preload=preload, warmup=warmup, verify=verify, threads=threads)
        self.tokenizer = Tokenizer.from_files(self.program.artifact.read_folder("tokenizer"))
        self._engine = Engine(self.program, self.tokenizer)
        self._engine_lock = threading.Lock()
        self._requests = 0

    @property
    def stats(self) -> dict[str, Any]:
        """The program's counts and load times; see ``Program.stats``."""
        return self.program.stats

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together: the largest context bucket."""
        return self._engine.builder.longest

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts.

        Args:
            prompts: one prompt or a list: a string, a list of ids, or a mapping with ``prompt``, ``prompt_token_ids``,
                ``prompt_embeds`` ([n, H] rows of any float dtype), or ``prompt_token_ids``, ``prompt_embeds`` and
                ``prompt_is_token_ids`` (True takes the id) together.
            sampling_params: one for all, or one for each.

        Returns:
            One output for each prompt, in order.

        Raises:
            RequestError: a prompt or parameter is at fault; nothing was run, and the next call is not affected.
        """
        return self._run([self._parse(prompt) for prompt in _as_batch(prompts)], sampling_params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Render conversations with the model's chat template and generate the next turn of each.

        Args:
            messages: one conversation, a list of mappings with ``role`` and ``content``; or a list of conversations.
            sampling_params: one for all, or one for each.
            add_generation_prompt: end with the opening of the model's own turn.

        Raises:
            RequestError: no tokenizer or no template, or a conversation that the template refuses.
        """
        if self.tokenizer is None:
            raise PromptError(
                found="a conversation for an artifact without a tokenizer",
                expected="token ids or embeddings",
                action="rebuild from a checkpoint with a tokenizer, or render the conversation yourself",
            )
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Mapping[str, Any]]]", [messages] if one else messages)
        parsed = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
            parsed.append(dataclasses.replace(self._parse({"prompt_token_ids": ids}), text=text))
        return self._run(parsed, sampling_params)

    def embed(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The model's own embedding rows of ``token_ids``, [n, H] in the model dtype.

        Raises:
            PromptError: an id out of range.
        """
        ids = parse_token_ids(token_ids, vocab_size=self.program.model.vocab_size)
        rows: np.ndarray = self.program.embedding_table[ids]
        return rows

    def close(self) -> None:
        """Free weights, caches and programs. May be called more than once; requests after it are refused."""
        self.program.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.program!r})"

    def _run(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        params = _as_params(sampling_params, len(prompts))
        with self._engine_lock:
            ids = [str(self._requests + i) for i in range(len(prompts))]
            self._requests += len(prompts)
            try:
                for request_id, prompt, own in zip(ids, prompts, params, strict=True):
                    self._engine.add(request_id, prompt, own)
                outputs = {output.request_id: output for output in self._engine.run()}
            finally:
                self._engine.clear()
        return [outputs[request_id] for request_id in ids]

    def _parse(self, prompt: object) -> Prompt:
        model = self.program.model
        return parse_prompt(
            prompt,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            dtype=DTYPES[model.dtype],
            tokenizer=self.tokenizer,
            max_length=self.max_model_len,
        )


def _as_batch(prompts: Any) -> list[Any]:
    """A list of prompts. Whatever is no list is one prompt, and so is a list of ids."""
    if not isinstance(prompts, list | tuple) or (prompts and all(isinstance(p, int | np.integer) for p in prompts)):
        return [prompts]
    return list(prompts)


def _as_params(sampling_params: object, count: int) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if not isinstance(sampling_params, list | tuple) or len(sampling_params) != count:
        size = f"{len(sampling_params)} " if isinstance(sampling_params, list | tuple) else ""
        raise SamplingParamsError(
            found=f"{size}sampling parameters of type {type(sampling_params).__name__} for {count} prompts",
            expected="a SamplingParams for all, or a list with one for each",
            action="pass SamplingParams(temperature=0, ...)",
        )
    for own in sampling_params:
        if not isinstance(own, SamplingParams):
            raise SamplingParamsError(
                found=f"sampling parameters that hold a {type(own).__name__}",
                expected="a list of SamplingParams",
                action="pass SamplingParams(temperature=0, ...)",
            )
    return sampling_params
