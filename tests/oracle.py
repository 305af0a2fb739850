"""Transformers as the oracle, and our backbones to hold against it, compiled or eager, for tests of numbers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from aot_compiler.lowering import lower
from aot_compiler.trace import trace
from aot_compiler.xla import compile_for_cpu
from artifacts.signature import EntrySignature, TensorSpec, entry_signature
from model_defs.registry import build_backbone
from model_defs.step import Backbone, StepInputs
from runtime.batch import CachedSequence, Step, StepBuilder
from runtime.pjrt import Devices
from runtime.prompts import Prompt

transformers_logging.set_verbosity_error()  # it warns of rope options that are unusual, as those of tests are


def random_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A small Llama of Transformers with random weights, large enough in spread for logits to tell models apart."""
    defaults: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**defaults, **options}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.5)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return model


def hf_config(model: LlamaForCausalLM) -> dict[str, Any]:
    """The model's ``config.json``."""
    config = model.config.to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    return config


@torch.no_grad()
def oracle_logits(model: LlamaForCausalLM, embeds_TH: torch.Tensor) -> np.ndarray:
    """Logits of every position of one sequence given as embedding rows, [T, V] float32."""
    logits: np.ndarray = model(inputs_embeds=embeds_TH[None]).logits[0].float().numpy()
    return logits


class _SteppedBackbone(ABC):
    """A backbone with the entries and caches of one small layout, stepped like ``Program``.

    Args:
        model: gives the weights.
        config: the ``config.json`` that our backbone reads; None takes the model's own.
        prefill, decode, context: buckets, as in the configuration.
        block_size: tokens in a cache block.
        tokens: tokens that the cache holds, beside the null block.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        config: Mapping[str, Any] | None = None,
        prefill: Sequence[int],
        decode: Sequence[int],
        context: Sequence[int],
        block_size: int = 8,
        tokens: int = 256,
    ) -> None:
        self.backbone: Backbone = build_backbone(config or hf_config(model), "config.json", block_size)
        facts = self.backbone.facts
        self.caches = [
            TensorSpec(
                name=f"layers.{i}.{part}",
                shape=(tokens // block_size + 1, facts.num_key_value_heads, block_size, facts.head_dim),
                dtype="float32",
            )
            for i in range(len(self.backbone.layers))
            for part in "kv"
        ]
        self.entries: dict[str, EntrySignature] = {}
        for kind, sizes in (("prefill", prefill), ("decode", decode)):
            for rows in sizes:
                for C in context:
                    if kind == "prefill" and rows > C:
                        continue
                    signature = entry_signature(
                        kind,
                        rows=rows,
                        context=C,
                        block_size=block_size,
                        hidden_size=facts.hidden_size,
                        vocab_size=facts.vocab_size,
                        dtype="float32",
                    )
                    self.entries[signature.name] = signature
        self.builder = StepBuilder(self.entries.values(), block_size)

    @abstractmethod
    def fill_caches(self, value: float) -> None:
        """Set every cache to one value, NaN included."""

    @abstractmethod
    def run(self, step: Step) -> np.ndarray:
        """One step: logits [1, V] or [B, V]."""

    def inputs(self, step: Step) -> dict[str, np.ndarray]:
        """Every input of a step; those that it leaves out stand for a batch without embeddings."""
        return {
            spec.name: np.asarray(
                step.inputs.get(spec.name, np.full(spec.shape, spec.name == "is_token_ids")), spec.numpy_dtype
            )
            for spec in self.entries[step.entry].inputs
        }


class CompiledBackbone(_SteppedBackbone):
    """Entries of a backbone, traced, lowered and compiled in this process, with the model's weights."""

    def __init__(self, model: LlamaForCausalLM, **options: Any) -> None:
        super().__init__(model, **options)
        parameters = [
            TensorSpec(name=name, shape=tuple(p.shape), dtype="float32") for name, p in self.backbone.named_parameters()
        ]
        weights = model.state_dict()
        self.devices = Devices(1)
        self.weights = [self.devices.copy(weights[spec.name].numpy()) for spec in parameters]
        self.hlo: dict[str, bytes] = {}
        self.executables = {}
        for name, signature in self.entries.items():
            lowered = lower(trace(self.backbone, signature, self.caches, parameters))
            self.hlo[name] = lowered.hlo
            self.executables[name] = self.devices.load(compile_for_cpu(lowered.hlo, 1), "test")
        self.fill_caches(0.0)

    def fill_caches(self, value: float) -> None:
        self.cache_buffers = [self.devices.copy(np.full(spec.shape, value, spec.numpy_dtype)) for spec in self.caches]

    def run(self, step: Step) -> np.ndarray:
        arguments = [self.devices.copy(each) for each in self.inputs(step).values()]
        outputs = self.executables[step.entry].execute([*arguments, *self.cache_buffers, *self.weights])
        self.cache_buffers = outputs[1:]
        return np.asarray(outputs[0])


class EagerBackbone(_SteppedBackbone):
    """The same steps in eager torch, through ``Backbone.forward``: nothing is traced or compiled."""

    def __init__(self, model: LlamaForCausalLM, **options: Any) -> None:
        super().__init__(model, **options)
        weights = model.state_dict()
        own = {name: weights[name] for name, _ in self.backbone.named_parameters(remove_duplicate=False)}
        self.backbone.load_state_dict(own, assign=True)
        self.fill_caches(0.0)

    def fill_caches(self, value: float) -> None:
        tensors = [torch.full(spec.shape, value) for spec in self.caches]
        self.cache_tensors = list(zip(tensors[::2], tensors[1::2], strict=True))

    @torch.no_grad()
    def run(self, step: Step) -> np.ndarray:
        inputs = {name: torch.from_numpy(each) for name, each in self.inputs(step).items()}
        logits, self.cache_tensors = self.backbone(StepInputs(**inputs), self.cache_tensors)
        found: np.ndarray = logits.numpy()
        return found


def token_prompt(ids: Sequence[int]) -> Prompt:
    """A prompt of token ids alone."""
    token_ids = np.asarray(ids, np.int32)
    return Prompt(token_ids=token_ids, is_token_ids=np.ones(len(token_ids), np.bool_), embeds=None, text=None)


def mixed_prompt(ids: Sequence[int], rows_TH: np.ndarray, is_token_ids: Sequence[bool]) -> Prompt:
    """A prompt of ids where the mask is True and rows elsewhere."""
    mask = np.asarray(is_token_ids, np.bool_)
    return Prompt(
        token_ids=np.where(mask, np.asarray(ids, np.int32), 0).astype(np.int32),
        is_token_ids=mask,
        embeds=np.where(mask[:, None], 0, rows_TH).astype(rows_TH.dtype),
        text=None,
    )


def sequence(prompt: Prompt, blocks: Sequence[int]) -> CachedSequence:
    """A request in the cache blocks given."""
    return CachedSequence(prompt=prompt, blocks=list(blocks))
