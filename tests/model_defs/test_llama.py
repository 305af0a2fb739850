"""Llama against Transformers over its whole option space, and what must change nothing.

Eager examples go through ``Backbone.forward``, compiled ones through tracing, lowering and XLA. `make fuzz` runs both
over many more.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
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
BUCKETS: dict[str, Any] = {"prefill": (12,), "decode": (4,), "context": (40,), "block_size": BLOCK, "tokens": 160}
"""A prefill bucket that is no multiple of the block, so that later chunks start inside one."""

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
SUITE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes: that is for `make fuzz`
    suppress_health_check=QUIET,
)
FUZZ = settings(deadline=None, print_blob=True, suppress_health_check=QUIET)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small for threads: with two, torch takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        "num_hidden_layers": draw(st.sampled_from([1, 2, 3])),
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
        lengths=st.lists(st.integers(1, 36), min_size=2, max_size=4).map(tuple),
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
    n = BUCKETS["context"][0] // BLOCK
    pool = 1 + generator.permutation(BUCKETS["tokens"] // BLOCK)
    requests = []
    for i, length in enumerate(lengths):
        ids = generator.integers(0, model.config.vocab_size, length)
        rows_TH = generator.standard_normal((length, model.config.hidden_size), np.float32)
        mask = generator.random(length) < generator.choice([0.0, 0.5, 1.0])
        requests.append(sequence(mixed_prompt(ids, rows_TH, mask), pool[i * n : (i + 1) * n].tolist()))
    return requests


def prompt_rows(model: LlamaForCausalLM, prompt: Prompt) -> torch.Tensor:
    """The embedding rows that a prompt stands for."""
    rows_TH = embed(model, prompt.token_ids)
    if prompt.embeds is None:
        return rows_TH
    return torch.where(torch.tensor(prompt.is_token_ids)[:, None], rows_TH, torch.tensor(prompt.embeds))


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


@settings(SUITE, max_examples=100)
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


# What must change nothing


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled model that the tests below share; each starts from caches of zeros."""

    model: LlamaForCausalLM
    backbone: CompiledBackbone

    def prefill(self, prompt: Prompt, blocks: Sequence[int]) -> np.ndarray:
        """Logits of every chunk's last row, [chunks, V]."""
        steps = self.backbone.builder.prefill(sequence(prompt, blocks))
        return np.concatenate([self.backbone.run(step) for step in steps])


@pytest.fixture(scope="module")
def _compiled() -> Compiled:
    model = random_llama(1)
    return Compiled(model=model, backbone=CompiledBackbone(model, **BUCKETS))


@pytest.fixture
def compiled(_compiled: Compiled) -> Compiled:
    _compiled.backbone.fill_caches(0.0)
    return _compiled


IDS = [3, 96, 0, 17, 17, 41, 5, 8, 60, 2, 33, 90, 1, 71, 9, 12, 55, 4, 4, 28]
BLOCKS = [7, 2, 11]


@pytest.mark.parametrize(
    "kept", [(), (0, 3, 4, 19), range(0, 12), range(12, 20)], ids=["none", "some", "first", "last"]
)
def test_rows_of_the_ids_give_the_bits_of_the_ids(compiled: Compiled, kept: Sequence[int]) -> None:
    """Whichever positions stay ids, the others being given as the embedding rows of the same ids."""
    expected = compiled.prefill(token_prompt(IDS), BLOCKS)
    rows_TH = embed(compiled.model, IDS).numpy()
    found = compiled.prefill(mixed_prompt(IDS, rows_TH, [i in kept for i in range(len(IDS))]), BLOCKS)
    np.testing.assert_array_equal(found, expected)


def test_content_of_unwritten_cache_changes_nothing(compiled: Compiled) -> None:
    """NaN and infinity everywhere, the null block included."""
    expected = compiled.prefill(token_prompt(IDS), BLOCKS)
    for value in (float("nan"), float("inf"), -1e30):
        compiled.backbone.fill_caches(value)
        np.testing.assert_array_equal(compiled.prefill(token_prompt(IDS), BLOCKS), expected)


def test_reused_blocks_that_held_nan_change_nothing(compiled: Compiled) -> None:
    expected_prefill = compiled.prefill(token_prompt(IDS), BLOCKS)
    request = sequence(token_prompt(IDS), BLOCKS)
    request.output_ids.append(6)
    expected_decode = compiled.backbone.run(compiled.backbone.builder.decode([request]))[0]
    broken = mixed_prompt([0] * 24, np.full((24, 32), np.nan, np.float32), [False] * 24)
    assert np.isnan(compiled.prefill(broken, BLOCKS)).all()
    np.testing.assert_array_equal(compiled.prefill(token_prompt(IDS), BLOCKS), expected_prefill)
    # The rest of the last block still holds NaN, and a decode reads that block.
    np.testing.assert_array_equal(
        compiled.backbone.run(compiled.backbone.builder.decode([request]))[0], expected_decode
    )


def test_a_request_of_nan_leaves_its_neighbours_alone(compiled: Compiled) -> None:
    """In one decode step: a row whose keys and values are NaN, beside a row of another request."""
    good, broken = sequence(token_prompt(IDS), BLOCKS), sequence(token_prompt(IDS), [1, 5, 9])
    for request, prompt in (
        (good, good.prompt),
        (broken, mixed_prompt(IDS, np.full((20, 32), np.nan, np.float32), [False] * 20)),
    ):
        compiled.prefill(prompt, request.blocks)
        request.output_ids.append(6)
    alone = compiled.backbone.run(compiled.backbone.builder.decode([good, good]))
    beside = compiled.backbone.run(compiled.backbone.builder.decode([good, broken]))
    np.testing.assert_array_equal(beside[0], alone[0])
    assert np.isnan(beside[1]).all()


def test_content_of_padding_rows_changes_nothing(compiled: Compiled) -> None:
    """Eight of a prefill's rows are padding: other ids there, or NaN where ids are taken, give the same bits."""
    prompt = token_prompt(IDS[:4])
    expected = compiled.prefill(prompt, BLOCKS)

    def other_ids(step: Step) -> None:
        step.inputs["input_ids"][4:] = 50

    def nan_rows(step: Step) -> None:
        embeds, mask = np.full((12, 32), np.nan, np.float32), np.ones(12, np.bool_)
        step.inputs.update(inputs_embeds=embeds, is_token_ids=mask)  # type: ignore[attr-defined]

    for change in (other_ids, nan_rows):
        (step,) = compiled.backbone.builder.prefill(sequence(prompt, BLOCKS))
        change(step)
        np.testing.assert_array_equal(compiled.backbone.run(step), expected)


def test_other_requests_and_padding_change_no_row(compiled: Compiled) -> None:
    """A row of a decode has the same bits beside other requests as beside padding."""
    requests = [sequence(token_prompt(IDS[i:]), [1 + 3 * i, 2 + 3 * i, 3 + 3 * i]) for i in range(4)]
    for request in requests:
        compiled.prefill(request.prompt, request.blocks)
        request.output_ids.append(6)
    full = compiled.backbone.run(compiled.backbone.builder.decode(requests))
    for count in (1, 2, 3):
        fewer = compiled.backbone.run(compiled.backbone.builder.decode(requests[:count]))
        np.testing.assert_array_equal(fewer[:count], full[:count])


# Configurations that are refused

GOOD: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
COMPLETE = "add {key}, or point to a complete Hugging Face config.json"


def refused(**changes: Any) -> str:
    """The error for ``GOOD`` with some keys changed; a key that becomes ... is left out."""
    config = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(UnsupportedModelError) as caught:
        build_backbone(config, "config.json", BLOCK)
    return str(caught.value)


def test_good_configuration_is_taken() -> None:
    assert build_backbone(GOOD, "config.json", BLOCK).facts.head_dim == 8


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_key(key: str) -> None:
    assert refused(**{key: ...}) == f"config.json: no key {key}; expected an integer; {COMPLETE.format(key=key)}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "config.json: architecture MambaForCausalLM; expected one of LlamaForCausalLM; "
            "use a model of a supported architecture",
        ),
        (
            {"architectures": ...},
            "config.json: no architectures; expected one of LlamaForCausalLM; use a model of a supported architecture",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "config.json: quantization_config; expected weights in a floating-point type; "
            "use the unquantised checkpoint",
        ),
        (
            {"num_key_value_heads": 3},
            "config.json: 4 attention heads, 3 key/value heads; expected attention heads that are a multiple of "
            "key/value heads; correct num_key_value_heads",
        ),
        (
            {"hidden_act": "gelu_new"},
            "config.json: hidden_act is 'gelu_new'; expected one of silu, gelu, gelu_pytorch_tanh, relu; "
            "use a model with a supported activation",
        ),
        ({"hidden_size": "32"}, "config.json: hidden_size is '32'; expected an integer; correct hidden_size"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0; expected an integer from 1 to 16777216; correct vocab_size"),
        (
            {"num_hidden_layers": True},
            "config.json: num_hidden_layers is True; expected an integer; correct num_hidden_layers",
        ),
        ({"mlp_bias": "no"}, "config.json: mlp_bias is 'no'; expected true or false; correct mlp_bias"),
        ({"rms_norm_eps": "1e-5"}, "config.json: rms_norm_eps is '1e-5'; expected a number; correct rms_norm_eps"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "config.json: rope type 'dynamic'; expected one of default, linear, llama3, yarn; choose another type: "
            "dynamic scaling depends on the longest sequence of the batch, so that cached keys would change, "
            "which a fixed graph cannot do",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "config.json: rope type 'longrope'; expected one of default, linear, llama3, yarn; "
            "choose a supported rope type",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor 0.5 with head_dim 8; expected factor 1 and an even head_dim; "
            "use a model that rotates whole heads",
        ),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
            "config.json: partial_rotary_factor 0.25 with head_dim 8; expected factor 1 and an even head_dim; "
            "use a model that rotates whole heads",
        ),
        (
            {"head_dim": 7},
            "config.json: partial_rotary_factor 1 with head_dim 7; expected factor 1 and an even head_dim; "
            "use a model that rotates whole heads",
        ),
        (
            {"rope_parameters": 3},
            "config.json: rope_parameters is 3; expected a mapping; correct rope_parameters",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "config.json: rope_scaling: no key factor; expected a number; " + COMPLETE.format(key="factor"),
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "config.json: rope_scaling: factor is 0.5; expected a number of at least 1; correct factor",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0}},
            "config.json: rope_parameters: no key high_freq_factor; expected a number; "
            + COMPLETE.format(key="high_freq_factor"),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "config.json: rope_parameters: low_freq_factor 4, high_freq_factor 4; "
            "expected high_freq_factor above low_freq_factor; correct the two factors",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(value),
)
def test_refused_with_a_reason(changes: dict[str, Any], text: str) -> None:
    assert refused(**changes) == text


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e30}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": -5,
                }
            },
            "original_max_position_embeddings",
        ),
        *(
            ({key: size}, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
            for size in (0, -1, 2**62, 10**5000)
        ),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
    ],
)
def test_nonsense_numbers_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    text = refused(**changes)
    assert key in text
    assert "\n" not in text
    assert len(text) < 300
