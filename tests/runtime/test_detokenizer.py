from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.detokenizer import Detokenizer
from runtime.tokenizer import Tokenizer
from tests.runtime import small_tokenizers

KINDS = {"byte level": small_tokenizers.byte_level, "byte fallback": small_tokenizers.byte_fallback}
TOKENIZERS = {name: Tokenizer(make(), {}, None) for name, make in KINDS.items()}
SIZES = {name: make().get_vocab_size() for name, make in KINDS.items()}


def stream(tokenizer, ids, stop=()):
    """Texts after each token, the last after the end; the stop string; and how many tokens it took."""
    detokenizer = Detokenizer(tokenizer, stop=stop)
    texts = []
    for token_id in ids:
        found = detokenizer.push(token_id)
        texts.append(detokenizer.text)
        if found is not None:
            break
    pushed = len(texts)
    assert detokenizer.finish() == detokenizer.stop_string
    texts.append(detokenizer.text)
    return texts, detokenizer.stop_string, pushed


@settings(deadline=None, max_examples=300)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_streamed_text_is_that_of_all_tokens_at_once(kind, data):
    """Any ids: broken characters, specials and unknown ids in between, bytes that are no text."""
    ids = data.draw(st.lists(st.integers(0, SIZES[kind] + 3), max_size=40))
    texts, _, _ = stream(TOKENIZERS[kind], ids)
    assert texts[-1] == TOKENIZERS[kind].decode(ids)
    for earlier, later in pairwise(texts):
        assert later.startswith(earlier)


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(list(KINDS)),
    text=st.one_of(st.text(max_size=30), st.text(alphabet="the a\u20ac\U0001f600 ", max_size=30)),
)
def test_no_half_characters(kind, text):
    text = text.encode(errors="replace").decode().replace("\ufffd", "")
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts, _, _ = stream(tokenizer, ids)
    assert texts[-1] == tokenizer.decode(ids)
    assert all("\ufffd" not in shown and texts[-1].startswith(shown) for shown in texts)


def test_a_character_of_four_tokens_appears_whole():
    for kind, tokenizer in TOKENIZERS.items():
        ids = tokenizer.encode("a \U0001f600 b", add_special_tokens=False)
        texts, _, _ = stream(tokenizer, ids)
        assert texts[-1] == "a \U0001f600 b", kind
        assert "a " in texts, kind
        assert {text.count("\U0001f600") for text in texts} == {0, 1}


def test_words_keep_their_spaces_and_come_at_once():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.encode("the the a", add_special_tokens=False)
    assert stream(tokenizer, ids)[0] == ["the", "the the", "the the a", "the the a"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    tokenizer = TOKENIZERS["byte level"]
    euro = tokenizer.encode("\u20ac")
    assert len(euro) == 3
    ids = [*tokenizer.encode("a"), *euro[:2]]
    texts, _, _ = stream(tokenizer, ids)
    assert texts == ["a", "a", "a", "a\ufffd"]


def reference_stop(text, stop):
    """Character by character: the stop string that is complete first, the longest of those that end together."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(list(KINDS)),
    text=st.text(alphabet="thea \u20ac", max_size=24),
    stop=st.lists(st.text(alphabet="thea \u20ac", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(kind, text, stop):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = reference_stop(tokenizer.decode(ids), stop)
    texts, found, _ = stream(tokenizer, ids, stop)
    assert (texts[-1], found) == expected
    assert all(expected[0].startswith(shown) for shown in texts)  # no part of a stop string was shown


def test_stop_string_over_several_tokens():
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("The quick brown fox jumps over")
    texts, found, pushed = stream(tokenizer, ids, stop=["own fo", "never"])
    assert (texts[-1], found) == ("The quick br", "own fo")
    assert pushed == min(count for count in range(len(ids)) if "own fo" in tokenizer.decode(ids[:count]))


def test_beginning_of_a_stop_string_is_held_and_given_at_the_end():
    tokenizer = TOKENIZERS["byte level"]
    ids = [token_id for letter in "xab" for token_id in tokenizer.encode(letter)]
    assert stream(tokenizer, ids, stop=["abc"]) == (["x", "x", "x", "xab"], None, 3)


def test_stop_string_that_the_end_completes():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.encode("a\u20ac", add_special_tokens=False)  # bytes may go on, so the last is held until the end
    texts, found, pushed = stream(tokenizer, ids, stop=["\u20ac"])
    assert (texts[-1], found, pushed) == ("a", "\u20ac", len(ids))


def test_finish_twice_changes_nothing():
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer, stop=["zz"])
    for token_id in tokenizer.encode("abz"):
        detokenizer.push(token_id)
    assert [detokenizer.finish(), detokenizer.text] == [None, "abz"]
    assert [detokenizer.finish(), detokenizer.text] == [None, "abz"]


def test_which_tokens_may_change_with_the_next():
    byte_level, fallback = TOKENIZERS["byte level"], TOKENIZERS["byte fallback"]
    assert [i for i in range(SIZES["byte level"]) if byte_level.may_change_with_next(i)] == [0, 1, 2]
    assert [i for i in range(SIZES["byte fallback"]) if fallback.may_change_with_next(i)] == list(range(259))
    assert byte_level.may_change_with_next(SIZES["byte level"])
