"""``LLM``: prompts in, tokens out. The way into the runtime: load, check prompts, run the engine, return outputs."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        parsed = [self._parse(prompt) for prompt in batch]
        with self._engine_lock:
            ids = [str(self._requests + i) for i in range(len(batch))]
            self._requests += len(batch)
            try:
                for request_id, prompt, own in zip(ids, parsed, params, strict=True):
                    self._engine.add(request_id, prompt, own)
                outputs = {output.request_id: output for output in self._engine.run()}
            finally:
                self._engine.clear()
        return [outputs[request_id] for request_id in ids]

    def chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Render a conversation with the model's chat template and generate the next turn."""
        if self.tokenizer is None:
            raise PromptError(
                found="a conversation for an artifact without a tokenizer",
                expected="token ids or embeddings",
                action="rebuild from a checkpoint with a tokenizer, or render the conversation yourself",
            )
        text = self.tokenizer.apply_chat_template(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        return self.generate({"prompt_token_ids": ids}, sampling_params)

    def embed(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The model's own embedding rows of ``token_ids``, [n, H] in the model dtype.

        Raises:
            PromptError: an id out of range.
        """
        ids = parse_token_ids(token_ids, vocab_size=self.program.model.vocab_size)
        rows: np.ndarray = self.program.embedding_table[ids]
        return rows

    def close(self) -> None:
        """Stop loading in the background."""
        self.program.close()

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
    """A list of prompts; a string, a mapping and a list of ids are each one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray) or (prompts and all(isinstance(item, int | np.integer) for item in prompts)):
        return [prompts]
    return list(prompts)


def _as_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise SamplingParamsError(
            found=f"{len(sampling_params)} sampling parameters for {count} prompts",
            expected="one for all, or one for each",
            action="pass as many as there are prompts",
        )
    return sampling_params
