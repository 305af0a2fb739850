import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import RequestError, SamplingParamsError
from runtime import sampling
from runtime.sampling import RankedLogprob, SamplingParams, sample

# Parameters


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens) == (1.0, 0, 1.0, None, 16)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs, params.n) == (
        (),
        (),
        False,
        None,
        1,
    )


def test_values_are_kept_as_plain_python():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1), stop="end", stop_token_ids={7}
    )
    assert (params.temperature, type(params.temperature)) == (0.5, float)
    assert (params.top_k, type(params.top_k)) == (3, int)
    assert params.seed == 2**64 - 1
    assert (params.stop, params.stop_token_ids) == (("end",), (7,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_params_are_values():
    params = SamplingParams(temperature=0, stop=["a"], seed=3)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(temperature=0.0, stop="a", seed=3))
    assert replace(params, seed=4).seed == 4
    with pytest.raises(SamplingParamsError, match="seed is -1"):
        replace(params, seed=-1)
    with pytest.raises(AttributeError):
        params.seed = 5


NUMBER = "temperature is {}; expected a number >= 0; 0 is greedy"
STRINGS = "stop holds {}; expected strings of one character or more; remove it; token ids go to stop_token_ids"
WHOLE = "top_k is {}; expected an integer >= -1; 0 or -1 choose among all tokens"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, NUMBER.format("-0.1")),
        ({"temperature": float("nan")}, NUMBER.format("nan")),
        ({"temperature": float("inf")}, NUMBER.format("inf")),
        ({"temperature": 10**400}, NUMBER.format("1" + "0" * 17 + "..." + "0" * 19)),
        ({"temperature": "0"}, NUMBER.format("'0'")),
        ({"temperature": True}, NUMBER.format("True")),
        ({"temperature": None}, NUMBER.format("None")),
        ({"top_k": -2}, WHOLE.format("-2")),
        ({"top_k": 1.0}, WHOLE.format("1.0")),
        ({"top_k": True}, WHOLE.format("True")),
        ({"top_p": 0}, "top_p is 0; expected a number above 0, at most 1; 1 keeps all tokens"),
        ({"top_p": 1.01}, "top_p is 1.01; expected a number above 0, at most 1; 1 keeps all tokens"),
        ({"seed": -1}, "seed is -1; expected None or an integer from 0 to 2**64 - 1; None gives a new seed"),
        ({"seed": 2**64}, f"seed is {2**64}; expected None or an integer from 0 to 2**64 - 1; None gives a new seed"),
        ({"max_tokens": 0}, "max_tokens is 0; expected an integer >= 1; ask for a token or more"),
        ({"max_tokens": None}, "max_tokens is None; expected an integer >= 1; ask for a token or more"),
        ({"n": 2}, "n is 2; expected 1; send the request once for each output"),
        ({"stop": ""}, STRINGS.format("''")),
        ({"stop": ["a", 2]}, STRINGS.format("2")),
        ({"stop": 5}, "stop is 5; expected a string or a list of strings; write it as a list"),
        ({"stop": b"x"}, "stop is b'x'; expected a string or a list of strings; write it as a list"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; expected a list of token ids; write it as a list"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'; expected a list of token ids; write it as a list"),
        ({"stop_token_ids": [-1]}, "a member of stop_token_ids is -1; expected a token id; remove it"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False; write one of them"),
        ({"logprobs": -1}, "logprobs is -1; expected None or an integer >= 0; None gives none"),
        ({"logprobs": True}, "logprobs is True; expected None or an integer >= 0; None gives none"),
    ],
)  # fmt: skip
def test_wrong_values(values, text):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "action"),
    [("temprature", "did you mean temperature?"), ("max_token", "did you mean max_tokens?"), ("zzz", "remove it")],
)
def test_unknown_keyword(name, action):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{name: 1})
    names = "n, temperature, top_k, top_p, seed, max_tokens, stop, stop_token_ids, ignore_eos, logprobs"
    assert str(caught.value) == f"unknown sampling parameter {name}; expected one of {names}; {action}"


# The choice


def reference_filter(logits, params):
    """Ids that may be chosen, by a full sort: logits down, ids up."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if 0 < params.top_k < len(logits):
        order = order[: params.top_k]
    weights = np.exp((logits[order] - logits.max()) / np.float32(params.temperature)).astype(np.float64)
    if params.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        order = order[before < params.top_p * weights.sum()]
    return order


def reference_sample(logits, params, seed, position):
    kept = np.sort(reference_filter(logits, params))
    weights = np.exp((logits[kept] - logits.max()) / np.float32(params.temperature)).astype(np.float64)
    cumulative = np.cumsum(weights)
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    return int(kept[np.argmax(cumulative > uniform * cumulative[-1])])


logits_lists = st.one_of(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=80),
    st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=900),  # ties, excluded tokens
)


@settings(deadline=None, max_examples=150)
@given(
    values=logits_lists,
    temperature=st.floats(0.05, 10),
    top_k=st.integers(-1, 100),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
def test_equals_a_full_sort(values, temperature, top_k, top_p, seed, position):
    logits = np.array(values, np.float32)
    if np.isneginf(logits).all():
        logits[0] = 0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    before = logits.copy()
    token = sample(logits, params, seed=seed, position=position).token_id
    assert token == reference_sample(logits, params, seed, position)
    assert np.isfinite(logits[token])
    np.testing.assert_array_equal(logits, before)


def test_nucleus_wider_than_the_first_guesses():
    logits = np.random.default_rng(0).normal(size=6000).astype(np.float32)
    params = SamplingParams(top_p=0.97)
    assert len(reference_filter(logits, params)) > 64 * 8
    tokens = [sample(logits, params, seed=1, position=i).token_id for i in range(50)]
    assert tokens == [reference_sample(logits, params, 1, i) for i in range(50)]


DISTRIBUTIONS = {
    "all": SamplingParams(),
    "hot": SamplingParams(temperature=2.5),
    "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.8),
    "together": SamplingParams(temperature=1.5, top_k=6, top_p=0.75),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_frequencies_are_the_probabilities(name, vary):
    params, draws = DISTRIBUTIONS[name], 1500
    logits = np.array([1.0, -0.5, 2.0, 0.0, 1.5, -2.0, 0.7, 1.0], np.float32)
    kept = reference_filter(logits, params)
    expected = np.zeros(len(logits))
    expected[kept] = np.exp(logits[kept].astype(np.float64) / params.temperature)
    expected *= draws / expected.sum()

    keys = [{"seed": 11, "position": i} if vary == "position" else {"seed": i, "position": 11} for i in range(draws)]
    counts = np.bincount([sample(logits, params, **key).token_id for key in keys], minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 24.3  # 0.999 quantile with 7 degrees of freedom, the most there are here


def test_known_draws():
    """The stream is part of what a seed promises: it may not change with a release."""
    logits = np.linspace(-1, 1, 1000, dtype=np.float32)
    tokens = [sample(logits, SamplingParams(), seed=1234, position=i).token_id for i in range(6)]
    assert tokens == [572, 782, 208, 556, 764, 307]


def test_greedy_takes_the_lowest_index_of_the_best():
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1e-6), SamplingParams(top_k=1)):
        assert {sample(logits, params, seed=i, position=i).token_id for i in range(20)} == {1}


def test_ends_of_the_uniform_draw(monkeypatch):
    """The draw 0 must not choose an excluded token, nor the largest draw run past the last."""
    logits = np.array([-np.inf, 0, 1, 2, -np.inf], np.float32)
    monkeypatch.setattr(sampling, "_uniform", lambda seed, position: 0.0)
    assert sample(logits, SamplingParams(), seed=0, position=0).token_id == 1
    monkeypatch.setattr(sampling, "_uniform", lambda seed, position: 1 - 2.0**-53)
    assert sample(logits, SamplingParams(), seed=0, position=0).token_id == 3


def test_nucleus_that_is_reached_exactly():
    logits = np.zeros(4, np.float32)
    tokens = {sample(logits, SamplingParams(top_p=0.5), seed=1, position=i).token_id for i in range(50)}
    assert tokens == {0, 1}


def test_filters_that_keep_all_change_nothing():
    logits = np.random.default_rng(1).normal(size=200).astype(np.float32)
    wide = [SamplingParams(), SamplingParams(top_k=-1), SamplingParams(top_k=200), SamplingParams(top_k=10**9)]
    for position in range(30):
        assert len({sample(logits, params, seed=5, position=position).token_id for params in wide}) == 1


@pytest.mark.parametrize(
    ("values", "temperature", "tokens"),
    [
        ([-3e38, 3e38, 0, -np.inf], 1e-5, {1}),
        ([-3e38, 3e38, 0, -np.inf], 1.0, {1}),
        ([-3e38, 3e38, 0, -np.inf], 1e300, {1, 2}),
        ([-1, 1, 0, -np.inf], 1e-3, {1}),
        ([-1, 1, 0, -np.inf], 1e30, {0, 1, 2}),
        ([-1, 1, 0, -np.inf], 1e300, {0, 1, 2}),
    ],
)
def test_extreme_temperatures_and_logits(values, temperature, tokens):
    params = SamplingParams(temperature=temperature)
    logits = np.array(values, np.float32)
    assert {sample(logits, params, seed=2, position=i).token_id for i in range(60)} == tokens


@pytest.mark.parametrize(
    ("values", "largest"), [([0, np.nan, 1], "nan"), ([0, np.inf, 1], "inf"), ([-np.inf, -np.inf], "-inf")]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_distribution(values, largest, temperature):
    with pytest.raises(RequestError) as caught:
        sample(np.array(values, np.float32), SamplingParams(temperature=temperature), seed=0, position=17)
    assert str(caught.value) == (
        f"the logits of position 17 have the maximum {largest}; expected finite logits; "
        "check the prompt embeddings, the checkpoint and the model dtype for values out of range"
    )


# Log-probabilities


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_are_of_the_raw_distribution():
    logits = np.random.default_rng(2).normal(scale=3, size=500).astype(np.float32)
    expected = log_softmax(logits)
    best = np.argsort(-logits)[:3]
    outside = 0
    for position in range(20):
        params = SamplingParams(temperature=3, top_k=50, top_p=0.9, logprobs=3)
        sampled = sample(logits, params, seed=3, position=position)
        assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=1e-6)
        listed = list(sampled.top_logprobs)
        assert listed[:3] == best.tolist()
        assert listed[3:] == ([] if sampled.token_id in best else [sampled.token_id])
        outside += len(listed) == 4
        for token_id, (logprob, rank) in sampled.top_logprobs.items():
            assert logprob == pytest.approx(expected[token_id], abs=1e-6)
            assert rank == 1 + (logits > logits[token_id]).sum()
    assert outside


def test_logprobs_zero_reports_the_chosen_token_alone():
    sampled = sample(
        np.array([0, np.log(3)], np.float32), SamplingParams(temperature=0, logprobs=0), seed=0, position=0
    )
    assert dict(sampled.top_logprobs) == {1: RankedLogprob(pytest.approx(np.log(0.75)), 1)}


def test_equal_logits_are_ranked_by_id():
    sampled = sample(np.array([1, 2, 2, 2], np.float32), SamplingParams(temperature=0, logprobs=9), seed=0, position=0)
    assert [(token_id, rank) for token_id, (_, rank) in sampled.top_logprobs.items()] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (0, 4),
    ]


def test_rank_of_a_chosen_token_among_equals():
    params, ranks = SamplingParams(logprobs=0), {}
    for position in range(40):
        sampled = sample(np.zeros(3, np.float32), params, seed=0, position=position)
        ranks[sampled.token_id] = sampled.top_logprobs[sampled.token_id].rank
    assert ranks == {0: 1, 1: 2, 2: 3}


def test_none_asked_none_computed():
    sampled = sample(np.array([1, 2], np.float32), SamplingParams(temperature=0), seed=0, position=0)
    assert (sampled.token_id, sampled.logprob, dict(sampled.top_logprobs)) == (1, None, {})
