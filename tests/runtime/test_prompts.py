import collections

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import PromptEmbedsError, PromptError
from runtime.prompts import parse_prompt, parse_token_ids
from runtime.tokenizer import Tokenizer
from tests.runtime import small_tokenizers

H, V, LONGEST = 4, 50, 10
FLOAT32 = np.dtype(np.float32)
TOKENIZER = Tokenizer(small_tokenizers.byte_level(), {}, None)


def parse(prompt, *, tokenizer=None, vocab_size=V, max_length=LONGEST):
    return parse_prompt(
        prompt, hidden_size=H, vocab_size=vocab_size, dtype=FLOAT32, tokenizer=tokenizer, max_length=max_length
    )


def rows(count):
    return (np.arange(count * H).reshape(count, H) / 8 - 1).astype(np.float32)


def refused(kind, prompt, **options):
    with pytest.raises(kind) as caught:
        parse(prompt, **options)
    assert type(caught.value) is kind
    return str(caught.value)


# Token ids


@pytest.mark.parametrize(
    "ids",
    [
        [3, 0, 49],
        (3, 0, 49),
        np.array([3, 0, 49]),
        np.array([3, 0, 49], np.uint8),
        [np.int64(3), 0, np.uint16(49)],
        torch.tensor([3, 0, 49]),
        jnp.array([3, 0, 49]),
    ],
    ids=lambda ids: type(ids).__name__,
)
@pytest.mark.parametrize("keyed", [False, True])
def test_token_ids(ids, keyed):
    prompt = parse({"prompt_token_ids": ids} if keyed else ids)
    assert prompt.token_ids.tolist() == [3, 0, 49]
    assert prompt.token_ids.dtype == np.int32
    assert prompt.is_token_ids.tolist() == [True, True, True]
    assert prompt.is_token_ids.dtype == np.bool_
    assert (prompt.embeds, prompt.text) == (None, None)
    assert prompt.reported_ids == [3, 0, 49]


RANGE = "expected integers from 0 to 49; take the ids from this model's own tokenizer"
LIST = "expected a list of integers or an integer array [n]; pass embeddings as prompt_embeds and text as prompt"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 50], f"prompt_token_ids holds 50 at row 1; {RANGE}"),
        ([1, 2, -1], f"prompt_token_ids holds -1 at row 2; {RANGE}"),
        ([2**70], f"prompt_token_ids holds {2**70} at row 0; {RANGE}"),
        ([1.0], f"prompt_token_ids holds 1.0 at row 0; {RANGE}"),
        ([1, True], f"prompt_token_ids holds True at row 1; {RANGE}"),
        ([None], f"prompt_token_ids holds None at row 0; {RANGE}"),
        (["a"], f"prompt_token_ids holds 'a' at row 0; {RANGE}"),
        ([[1, 2]], f"prompt_token_ids holds [1, 2] at row 0; {RANGE}"),
        (np.array([1, -7]), f"prompt_token_ids holds -7 at row 1; {RANGE}"),
        (np.array([2**63], np.uint64), f"prompt_token_ids holds {2**63} at row 0; {RANGE}"),
        (np.array([1.0]), f"prompt_token_ids is float64[1]; {LIST}"),
        (np.array([True]), f"prompt_token_ids is bool[1]; {LIST}"),
        (np.array([[1, 2]]), f"prompt_token_ids is int64[1, 2]; {LIST}"),
        (np.array(3), f"prompt_token_ids is int64[]; {LIST}"),
        (np.array([1, None]), f"prompt_token_ids is object[2]; {LIST}"),
        (
            torch.empty(2, dtype=torch.int64, device="meta"),
            f"prompt_token_ids is a torch tensor on device meta; {LIST}",
        ),
        ("abc", f"prompt_token_ids is of type str; {LIST}"),
        (b"abc", f"prompt_token_ids is of type bytes; {LIST}"),
        (7, f"prompt_token_ids is of type int; {LIST}"),
        (None, f"prompt_token_ids is of type NoneType; {LIST}"),
    ],
    ids=str,
)
def test_wrong_token_ids(ids, text):
    assert refused(PromptError, {"prompt_token_ids": ids}) == text


def test_ids_for_embed():
    assert parse_token_ids([3, 49], vocab_size=V).tolist() == [3, 49]
    assert parse_token_ids([], vocab_size=V).shape == (0,)
    assert parse_token_ids(np.array([3]), vocab_size=V).dtype == np.int32
    with pytest.raises(PromptError, match=r"^token_ids holds 50 at row 0; expected integers from 0 to 49; "):
        parse_token_ids([50], vocab_size=V)


# Length

LENGTH = "a prompt of {} tokens; expected at most 9, as a sequence holds 10 and at least one is generated; " \
    "shorten the prompt, or compile a larger context bucket"  # fmt: skip
EMPTY = "an empty prompt; expected one token or more; pass text, token ids or embeddings"


def of_length(count):
    mask = [i % 2 == 0 for i in range(count)]
    return {
        "ids": {"prompt_token_ids": [1] * count},
        "embeddings": {"prompt_embeds": np.ones((count, H), np.float32)},
        "mixed": {
            "prompt_token_ids": [1] * count,
            "prompt_embeds": np.ones((count, H), np.float32),
            "prompt_is_token_ids": mask,
        },
    }


@pytest.mark.parametrize("form", ["ids", "embeddings", "mixed"])
def test_length(form):
    assert len(parse(of_length(LONGEST - 1)[form]).token_ids) == LONGEST - 1
    assert refused(PromptError, of_length(LONGEST)[form]) == LENGTH.format(LONGEST)
    assert refused(PromptError, of_length(LONGEST + 1)[form]) == LENGTH.format(LONGEST + 1)
    assert refused(PromptError, of_length(0)[form]) == EMPTY


@pytest.mark.parametrize("prompt", ["", [], (), np.zeros(0, np.int32), {"prompt": ""}])
def test_empty(prompt):
    assert refused(PromptError, prompt, tokenizer=TOKENIZER) == EMPTY


# Text


@pytest.mark.parametrize("form", ["The fox", {"prompt": "The fox"}])
def test_text(form):
    prompt = parse(form, tokenizer=TOKENIZER, vocab_size=400)
    assert prompt.token_ids.tolist() == TOKENIZER.encode("The fox")
    assert prompt.is_token_ids.all()
    assert (prompt.embeds, prompt.text) == (None, "The fox")


def test_wrong_text():
    assert refused(PromptError, "x") == (
        "a prompt of text for an artifact without a tokenizer; expected prompt_token_ids or prompt_embeds; "
        "encode the text with the model's own tokenizer and pass the ids"
    )
    assert refused(PromptError, {"prompt": [1]}, tokenizer=TOKENIZER) == (
        "prompt is of type list; expected a string; pass ids as prompt_token_ids, embeddings as prompt_embeds"
    )
    assert refused(PromptError, "The quick", tokenizer=TOKENIZER, vocab_size=5).startswith("the prompt's text holds ")
    assert refused(PromptError, "\udc80", tokenizer=TOKENIZER).startswith("the prompt's text is not Unicode")
    assert refused(PromptError, "x y z " * 9, tokenizer=TOKENIZER, vocab_size=400).startswith("a prompt of ")


# Forms

FORMS = "prompt, prompt_token_ids, prompt_embeds, or the last two with prompt_is_token_ids"
WHOLE = f"expected {FORMS}; pass all keys of one of these forms and no others"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({}, f"a prompt with no keys; {WHOLE}"),
        ({"prompt_embed": 1}, f"unknown key prompt_embed in a prompt; expected {FORMS}; did you mean prompt_embeds?"),
        ({"prompt": "a", "is_token_ids": 1}, f"unknown key is_token_ids in a prompt; expected {FORMS}; "
         "did you mean prompt_is_token_ids?"),
        ({"multi_modal_data": 1}, f"unknown key multi_modal_data in a prompt; expected {FORMS}; remove it"),
        ({5: 1}, f"unknown key 5 in a prompt; expected {FORMS}; remove it"),
        ({"prompt": "a", "prompt_token_ids": [1]}, f"a prompt with prompt, prompt_token_ids; {WHOLE}"),
        ({"prompt_token_ids": [1], "prompt_embeds": rows(1)},
         f"a prompt with prompt_token_ids, prompt_embeds; {WHOLE}"),
        ({"prompt_embeds": rows(1), "prompt_is_token_ids": [True]},
         f"a prompt with prompt_embeds, prompt_is_token_ids; {WHOLE}"),
        (5, "a prompt of type int; expected a string, a list of token ids, or a mapping of "
         f"{FORMS}; pass one of these"),
        (None, "a prompt of type NoneType; expected a string, a list of token ids, or a mapping of "
         f"{FORMS}; pass one of these"),
        (b"text", f"prompt_token_ids is of type bytes; {LIST}"),
        (rows(2), f"prompt_token_ids is float32[2, 4]; {LIST}"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_wrong_forms(prompt, text):
    assert refused(PromptError, prompt, tokenizer=TOKENIZER) == text


def test_any_mapping():
    assert parse(collections.ChainMap({"prompt_token_ids": [3]})).token_ids.tolist() == [3]


# Ids and embeddings mixed


def test_mixed():
    memory = rows(4)
    mixed = {
        "prompt_token_ids": [5, 6, 7, 8],
        "prompt_embeds": memory,
        "prompt_is_token_ids": [True, False, False, True],
    }
    prompt = parse(mixed)
    assert prompt.token_ids.tolist() == [5, 0, 0, 8]
    assert prompt.is_token_ids.tolist() == [True, False, False, True]
    np.testing.assert_array_equal(prompt.embeds[1:3], memory[1:3])
    np.testing.assert_array_equal(prompt.embeds[[0, 3]], 0)
    assert prompt.reported_ids == [5, None, None, 8]


def test_what_the_mask_leaves_out_is_not_read():
    memory = rows(3)
    memory[0] = np.nan
    for placeholder in (-1, V, 2**70, None):
        prompt = parse(
            {
                "prompt_token_ids": [5, placeholder, -1],
                "prompt_embeds": memory,
                "prompt_is_token_ids": [True, False, False],
            }
        )
        assert prompt.token_ids.tolist() == [5, 0, 0]
        np.testing.assert_array_equal(prompt.embeds[0], 0)
    text = refused(
        PromptEmbedsError,
        {"prompt_token_ids": [5, 0, 0], "prompt_embeds": memory, "prompt_is_token_ids": [False, False, False]},
    )
    assert text.startswith("prompt_embeds holds nan at row 0, column 0; ")
    text = refused(
        PromptError,
        {"prompt_token_ids": [0, -1, 0], "prompt_embeds": memory, "prompt_is_token_ids": [False, True, False]},
    )
    assert text == f"prompt_token_ids holds -1 at row 1; {RANGE}"


def test_mask_of_one_kind():
    ids = parse({"prompt_token_ids": [5, 6], "prompt_embeds": rows(2), "prompt_is_token_ids": [True, True]})
    assert (ids.embeds, ids.token_ids.tolist()) == (None, [5, 6])
    embeds = parse({"prompt_token_ids": [5, 6], "prompt_embeds": rows(2), "prompt_is_token_ids": [False, False]})
    np.testing.assert_array_equal(embeds.embeds, rows(2))
    assert embeds.token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("mask", [np.array([True, False]), torch.tensor([True, False]), jnp.array([True, False]),
                                  (True, np.bool_(False))], ids=lambda mask: type(mask).__name__)  # fmt: skip
def test_kinds_of_mask(mask):
    prompt = parse({"prompt_token_ids": [5, 6], "prompt_embeds": rows(2), "prompt_is_token_ids": mask})
    assert prompt.is_token_ids.tolist() == [True, False]


MASK = "expected a list of bools or a bool array [n]; pass True where a row is a token id"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ([1, 0], "prompt_is_token_ids holds 1 at row 0; expected bools; pass True where a row is a token id"),
        ([True, None], "prompt_is_token_ids holds None at row 1; expected bools; pass True where a row is a token id"),
        (np.array([1, 0]), f"prompt_is_token_ids is int64[2]; {MASK}"),
        (np.array([[True, False]]), f"prompt_is_token_ids is bool[1, 2]; {MASK}"),
        ("10", f"prompt_is_token_ids is of type str; {MASK}"),
        (None, f"prompt_is_token_ids is of type NoneType; {MASK}"),
    ],
    ids=str,
)
def test_wrong_masks(mask, text):
    assert (
        refused(PromptError, {"prompt_token_ids": [5, 6], "prompt_embeds": rows(2), "prompt_is_token_ids": mask})
        == text
    )


@pytest.mark.parametrize("counts", [(1, 2, 2), (3, 2, 2), (2, 3, 2), (2, 2, 3), (0, 2, 0)])
def test_lengths_that_differ(counts):
    ids, embeds, mask = counts
    mixed = {"prompt_token_ids": [1] * ids, "prompt_embeds": rows(embeds), "prompt_is_token_ids": [True] * mask}
    assert refused(PromptError, mixed) == (
        f"{ids} prompt_token_ids, {embeds} prompt_embeds and {mask} prompt_is_token_ids; "
        "expected one of each for every row of the prompt; "
        "fill ids with 0 and rows with zeros where the mask takes the other"
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, V - 1), st.booleans()), min_size=1, max_size=LONGEST - 1))
def test_mixed_prompts(members):
    ids, mask = [token_id for token_id, _ in members], [is_id for _, is_id in members]
    memory = rows(len(members))
    prompt = parse({"prompt_token_ids": ids, "prompt_embeds": memory, "prompt_is_token_ids": mask})
    assert prompt.is_token_ids.tolist() == mask
    for row, (token_id, is_id) in enumerate(members):
        assert prompt.token_ids[row] == (token_id if is_id else 0)
        assert prompt.reported_ids[row] == (token_id if is_id else None)
        if prompt.embeds is not None:
            np.testing.assert_array_equal(prompt.embeds[row], 0 if is_id else memory[row])
    assert (prompt.embeds is None) == all(mask)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(anything)
def test_whatever_comes_is_parsed_or_refused(prompt):
    try:
        parsed = parse(prompt, tokenizer=TOKENIZER, vocab_size=400)
    except (PromptError, PromptEmbedsError) as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert len(parsed.token_ids) == len(parsed.is_token_ids) > 0
