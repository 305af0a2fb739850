"""Llama against Transformers over its whole option space, and what must change nothing.

Eager examples go through ``Backbone.forward``, compiled ones through tracing, lowering and XLA. `make fuzz` runs both
over many more.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from artifacts.errors import UnsupportedModelError
from model_defs.registry import build_backbone
from runtime.batch import CachedSequence, Step
from runtime.prompts import Prompt
from tests.oracle import (
    CompiledBackbone,
    EagerBackbone,
    mixed_prompt,
    oracle_logits,
    random_llama,
    sequence,
    token_prompt,
)

TOLERANCE = 1e-4
"""Relative to max(1, largest logit)."""

BLOCK = 8
BUCKETS: dict[str, Any] = {"prefill": (5, 12), "decode": (4,), "context": (48,), "block_size": BLOCK, "tokens": 160}
"""Prefill buckets that are no multiples of the block, so that later chunks start inside one."""

SUITE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FUZZ = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


# The option space


def rope_options(rope_type: str) -> st.SearchStrategy[dict[str, Any]]:
    """Rope options of one type, as ``config.json`` has them, in the old form or the new one."""
    theta = st.sampled_from([10000.0, 100.0, 500000.0])
    factor = st.sampled_from([2.0, 1.0, 3.5, 8])
    original = st.sampled_from([16, 64])
    if rope_type == "default":
        scaling = st.just({})
    elif rope_type == "linear":
        scaling = st.fixed_dictionaries({"factor": factor})
    elif rope_type == "llama3":
        scaling = st.fixed_dictionaries(
            {
                "factor": factor,
                "low_freq_factor": st.sampled_from([1.0, 2]),
                "high_freq_factor": st.sampled_from([4.0, 3]),
            },
            optional={"original_max_position_embeddings": original},
        )
    else:
        scaling = st.fixed_dictionaries(
            {"factor": factor},
            optional={
                "original_max_position_embeddings": original,
                "attention_factor": st.sampled_from([1.5, 0.7]),
                "mscale": st.sampled_from([1.0, 0.707]),
                "mscale_all_dim": st.sampled_from([1.0, 0.5]),
                "beta_fast": st.sampled_from([32.0, 8]),
                "beta_slow": st.sampled_from([1.0, 2]),
                "truncate": st.booleans(),
            },
        )
    return st.builds(_rope_form, st.just(rope_type), theta, scaling, st.sampled_from(["new", "old", "oldest"]))


def _rope_form(rope_type: str, theta: float, scaling: dict[str, Any], form: str) -> dict[str, Any]:
    if form == "new":
        return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **scaling}}
    if rope_type == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    return {"rope_theta": theta, "rope_scaling": {"rope_type" if form == "old" else "type": rope_type, **scaling}}


@st.composite
def llama_options(draw: st.DrawFn, rope_type: str | None = None, activation: str | None = None) -> dict[str, Any]:
    """The keys of a small Llama's ``config.json``."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * group
    options: dict[str, Any] = {
        "vocab_size": draw(st.sampled_from([97, 5])),
        "num_hidden_layers": draw(st.sampled_from([2, 1, 3])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([kv_heads, None])) if group == 1 else kv_heads,
        "intermediate_size": draw(st.sampled_from([24, 7, 1])),
        "hidden_act": activation or draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": draw(st.sampled_from([64, 256])),
    }
    if draw(st.booleans()):
        options["hidden_size"] = heads * draw(st.sampled_from([3, 8]))
        options["head_dim"] = draw(st.sampled_from([6, 2, 16]))
    else:
        options["hidden_size"] = heads * draw(st.sampled_from([8, 4, 2]))
    types = [rope_type] if rope_type else ["default", "linear", "llama3", "yarn"]
    return options | draw(st.sampled_from(types).flatmap(rope_options))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the requests that it is to answer."""

    options: dict[str, Any]
    lengths: tuple[int, ...]
    """Prompt tokens of each request."""
    seed: int


def cases(rope_type: str | None = None, activation: str | None = None) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        options=llama_options(rope_type, activation),
        lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple),
        seed=st.integers(0, 2**16),
    )


# Equality with Transformers


def check(case: Case, kind: type[CompiledBackbone] | type[EagerBackbone]) -> None:
    """Hold every step of every request against Transformers: prefill in chunks, then decode, alone and in batches."""
    model = random_llama(case.seed, **copy.deepcopy(case.options))
    config = {"architectures": ["LlamaForCausalLM"], **case.options}
    backbone = kind(model, config=config, **BUCKETS)
    backbone.fill_caches(float("nan"))
    generator = np.random.default_rng(case.seed)
    requests = random_requests(model, case.lengths, generator)
    expected = {id(request): references(model, request, generator, 4) for request in requests}

    for request in requests:
        end = 0
        for step in backbone.builder.prefill(request):
            end += int(step.inputs["output_positions"][0]) + 1
            close(backbone.run(step)[0], expected[id(request)].logits_TV[end - 1])
        assert end == request.length
    for i in range(3):
        for request in requests:
            request.output_ids.append(expected[id(request)].next_ids[i])
        logits_BV = backbone.run(backbone.builder.decode(requests))
        for request, logits_V in zip(requests, logits_BV, strict=False):
            close(logits_V, expected[id(request)].logits_TV[request.length - 1])

    # The last rows of one request as the rows of one step, in any order: each sees those before it.
    first = requests[0]
    rows = min(4, len(first.output_ids) + 1)
    positions = generator.permutation(np.arange(first.length + 1 - rows, first.length + 1))
    logits_BV = backbone.run(rows_of_one_request(backbone, first, expected[id(first)], positions))
    for position, logits_V in zip(positions, logits_BV, strict=True):
        close(logits_V, expected[id(first)].logits_TV[position])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What Transformers says of one request and of the ids that come after its prompt."""

    next_ids: list[int]
    logits_TV: np.ndarray


def references(model: LlamaForCausalLM, request: CachedSequence, generator: np.random.Generator, n: int) -> Reference:
    """Logits of every position of the prompt and of ``n`` random ids after it."""
    next_ids = generator.integers(0, model.config.vocab_size, n).tolist()
    rows_TH = prompt_rows(model, request.prompt)
    embeds_TH = torch.cat([rows_TH, embed(model, next_ids)])
    return Reference(next_ids=next_ids, logits_TV=oracle_logits(model, embeds_TH))


def random_requests(
    model: LlamaForCausalLM, lengths: Sequence[int], generator: np.random.Generator
) -> list[CachedSequence]:
    """Requests of ids and rows mixed at random, in cache blocks at random."""
    per_request = BUCKETS["context"][0] // BLOCK
    pool = 1 + generator.permutation(BUCKETS["tokens"] // BLOCK)
    requests = []
    for i, length in enumerate(lengths):
        ids = generator.integers(0, model.config.vocab_size, length)
        rows_TH = generator.standard_normal((length, model.config.hidden_size), np.float32)
        mask = generator.random(length) < generator.choice([0.0, 0.5, 1.0])
        blocks = pool[i * 5 : i * 5 + min(per_request, 5)]
        requests.append(sequence(mixed_prompt(ids, rows_TH, mask), blocks.tolist()))
    return requests


def prompt_rows(model: LlamaForCausalLM, prompt: Prompt) -> torch.Tensor:
    """The embedding rows that a prompt stands for."""
    rows_TH = embed(model, prompt.token_ids)
    if prompt.embeds is None:
        return rows_TH
    return torch.where(torch.from_numpy(prompt.is_token_ids)[:, None], rows_TH, torch.from_numpy(prompt.embeds))


def embed(model: LlamaForCausalLM, ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    rows: torch.Tensor = model.model.embed_tokens(torch.as_tensor(np.asarray(ids, np.int64))).detach()
    return rows


def rows_of_one_request(
    backbone: CompiledBackbone | EagerBackbone, request: CachedSequence, reference: Reference, positions: np.ndarray
) -> Step:
    """A decode step whose rows are tokens of one request, which holds the step's last token not yet."""
    request.output_ids.append(reference.next_ids[len(request.output_ids)])
    step = backbone.builder.decode([request] * len(positions))
    prompt_length = len(request.prompt.token_ids)
    blocks = np.asarray(request.blocks)
    step.inputs["positions"][:] = positions
    step.inputs["input_ids"][:] = [reference.next_ids[position - prompt_length] for position in positions]
    step.inputs["slot_mapping"][:] = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    return step


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(found).all()
    difference = np.abs(found - expected).max()
    assert difference <= TOLERANCE * max(1.0, np.abs(expected).max()), difference


@settings(SUITE, max_examples=60)
@given(case=cases())
def test_eager_equals_transformers(case: Case) -> None:
    check(case, EagerBackbone)


@pytest.mark.parametrize(
    ("rope_type", "activation"),
    [("default", "silu"), ("linear", "gelu"), ("llama3", "gelu_pytorch_tanh"), ("yarn", "relu")],
)
def test_compiled_equals_transformers(rope_type: str, activation: str) -> None:
    @settings(SUITE, max_examples=3)
    @given(case=cases(rope_type, activation))
    def examples(case: Case) -> None:
        check(case, CompiledBackbone)

    examples()


@pytest.mark.fuzz
@settings(FUZZ, max_examples=3000)
@given(case=cases())
def test_fuzz_eager_equals_transformers(case: Case) -> None:
    check(case, EagerBackbone)


@pytest.mark.fuzz
@settings(FUZZ, max_examples=150)
@given(case=cases())
def test_fuzz_compiled_equals_transformers(case: Case) -> None:
    check(case, CompiledBackbone)
