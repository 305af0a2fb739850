import sys
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from artifacts.errors import CorruptArtifactError, PromptError
from runtime.tokenizer import Tokenizer
from tests.runtime import small_tokenizers

KINDS = {"byte level": small_tokenizers.byte_level, "byte fallback": small_tokenizers.byte_fallback}
TOKENIZERS = {name: Tokenizer(make(), {}, None) for name, make in KINDS.items()}

TEXTS = [
    "The quick brown fox",
    " leading and  double   spaces ",
    "Würde 你好 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 мир",
    "\u00e9\u0301 e\u0301",
    "a\n\n\tb\r\n",
]

# Tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text):
    tokenizer = TOKENIZERS["byte level"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens():
    tokenizer = TOKENIZERS["byte fallback"]
    assert tokenizer.encode("the a") == [1, *tokenizer.encode("the a", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("the a")) == "the a"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False) == "<s> the"
    assert TOKENIZERS["byte level"].encode("<|im_start|>") == [1]  # written in the text


def test_ids_without_a_token_give_no_text():
    tokenizer = TOKENIZERS["byte level"]
    assert tokenizer.decode([*tokenizer.encode("ab"), 100_000, *tokenizer.encode("cd")]) == "abcd"


def test_half_a_surrogate_pair():
    with pytest.raises(PromptError) as caught:
        TOKENIZERS["byte level"].encode("ab\ud83d")
    assert str(caught.value) == (
        "the prompt's text is not Unicode: it holds half of a surrogate pair; "
        "expected text that can be written in UTF-8; decode the bytes that it came from with their own encoding"
    )


def test_load(tmp_path):
    folder = small_tokenizers.write_folder(
        tmp_path / "tokenizer",
        small_tokenizers.byte_level(),
        config='{"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "add_bos_token": true, "x": [1]}',
        template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("The fox") == TOKENIZERS["byte level"].encode("The fox")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


def test_load_without_config_and_template(tmp_path):
    tokenizer = Tokenizer.load(small_tokenizers.write_folder(tmp_path, small_tokenizers.byte_level()))
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    with pytest.raises(PromptError) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert str(caught.value) == (
        "the artifact has no chat template; expected a chat_template.jinja beside its tokenizer; "
        "pass text that is already in the model's chat format"
    )


def test_no_tokenizer(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "absent") is None


def test_truncation_and_padding_of_the_training_are_off(tmp_path):
    made = small_tokenizers.byte_level()
    made.enable_truncation(max_length=4)
    made.enable_padding(length=8)
    tokenizer = Tokenizer.load(small_tokenizers.write_folder(tmp_path, made))
    text = "A tokenizer turns text into ids, and ids into text."
    assert tokenizer.encode(text) == TOKENIZERS["byte level"].encode(text)
    assert tokenizer.encode("x") == TOKENIZERS["byte level"].encode("x")


@pytest.mark.parametrize(
    ("name", "content", "start"),
    [
        ("tokenizer.json", b"{", "Cannot instantiate Tokenizer from buffer: EOF while parsing"),
        ("tokenizer_config.json", b"[1]", "Expected `object`, got `array`"),
        ("tokenizer_config.json", b'{"eos_token": 5}', "Expected `str | object | null`, got `int` - at `$.eos_token`"),
        ("chat_template.jinja", b"\xff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_damaged_files(tmp_path, name, content, start):
    expected = {
        "tokenizer.json": "a file of the tokenizers library",
        "tokenizer_config.json": "a JSON object whose special tokens are strings",
        "chat_template.jinja": "a Jinja template in UTF-8",
    }[name]
    small_tokenizers.write_folder(tmp_path, small_tokenizers.byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptArtifactError) as caught:
        Tokenizer.load(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"tokenizer/{name} cannot be read ({start}")
    assert text.endswith(f"; expected {expected}; restore the file or rebuild the artifact")


# Chat templates

CHATML = """{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ messages | tojson(ensure_ascii=True) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ 'none' if tools is none else 'some' }}",
    "dict": "{{ dict(a=1)['a'] }}{{ messages[-1]['content'].split('b')[0] }}{{ messages | length }}",
}
MESSAGES = [
    {"role": "system", "content": " Sei höflich <&> 'x' "},
    {"role": "user", "content": "a b 你好"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, add_generation_prompt):
    specials = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.byte_level(), chat_template=TEMPLATES[name], **specials
    )
    expected = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    tokenizer = Tokenizer(small_tokenizers.byte_level(), specials, TEMPLATES[name])
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt) == expected
    assert expected


def test_date_of_today():
    tokenizer = Tokenizer(small_tokenizers.byte_level(), {}, "{{ strftime_now('%Y') }}")
    assert tokenizer.apply_chat_template(MESSAGES) == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, "no role tool"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ messages[5].content.x }}", "list object has no element 5"),
        ("{% for %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe."),
    ],
)
def test_templates_that_fail(template, reason):
    tokenizer = Tokenizer(small_tokenizers.byte_level(), {}, template)
    with pytest.raises(PromptError) as caught:
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    assert str(caught.value) == (
        f"the chat template failed on these messages ({reason}); expected roles and contents that the template knows; "
        "correct the messages, or pass text that is already in the model's chat format"
    )


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], None, 5])
def test_messages_that_are_none(messages):
    tokenizer = Tokenizer(small_tokenizers.byte_level(), {}, CHATML)
    with pytest.raises(PromptError) as caught:
        tokenizer.apply_chat_template(messages)
    assert str(caught.value) == (
        "messages that are not a list of mappings; "
        'expected messages such as {"role": "user", "content": "..."}; pass a list of them'
    )


def test_without_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "runtime.chat_template", raising=False)
    tokenizer = Tokenizer(small_tokenizers.byte_level(), {}, CHATML)
    with pytest.raises(PromptError) as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert str(caught.value) == (
        "jinja2 is not installed; expected the extra that runs chat templates; "
        "install the project with its extra `chat`: pip install '.[chat]' in a checkout"
    )
