"""What the schema accepts and refuses; faults are read as a user meets them, through the file."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from aot_compiler.config import CompileConfig, Section, describe_keys
from tests.aot_compiler.small_config import BUCKET, BUCKETS, LAYOUT, SOURCE, VALID, Faults, edit, load

# What is accepted


def test_values_of_a_full_configuration(tmp_path: Path) -> None:
    config = load(tmp_path, VALID)
    assert (config.model.source, config.model.config, config.model.dtype) == ("models/tiny", None, "float32")
    assert (config.target.platform, config.target.isa) == ("cpu", "native")
    assert config.layouts == ("tp1", "tp4-sp")
    assert config.buckets.prefill == (32, 128)
    assert config.buckets.decode == (1, 4)
    assert config.buckets.context == (256, 512)
    assert (config.kv_cache.block_size, config.kv_cache.tokens, config.kv_cache.dtype) == (32, 8192, "float32")
    assert config.output == "compiled/tiny"


def test_defaults(tmp_path: Path) -> None:
    buckets = "{prefill: [8], decode: [1], context: [64]}"
    config = load(tmp_path, f"model: {{config: c}}\nbuckets: {buckets}\nkv_cache: {{tokens: 64}}\noutput: o\n")
    assert config.model.source is None
    assert config.model.dtype == "float32"
    assert config.target.model_dump() == {"platform": "cpu", "isa": "native"}
    assert config.layouts == ("tp1",)
    assert config.kv_cache.block_size == 32
    assert config.cache_dtype == "float32"


def test_target_as_a_mapping(tmp_path: Path) -> None:
    config = load(tmp_path, edit("target: cpu", "target: {platform: cpu, isa: x86-64-v3}"))
    assert (config.target.platform, config.target.isa) == ("cpu", "x86-64-v3")


def test_buckets_are_sorted(tmp_path: Path) -> None:
    assert load(tmp_path, edit("[256, 512]", "[512, 64, 256]")).buckets.context == (64, 256, 512)


def test_block_size_need_not_be_a_power_of_two(tmp_path: Path) -> None:
    text = edit("block_size: 32, tokens: 8192", "block_size: 24, tokens: 96").replace("[256, 512]", "[24, 96]")
    assert load(tmp_path, text.replace("[32, 128]", "[32]")).kv_cache.block_size == 24


def test_limits_are_inclusive(tmp_path: Path) -> None:
    text = edit("tokens: 8192", "tokens: 1073741824").replace("512]", "1048576]").replace("128]", "1048576]")
    config = load(tmp_path, text)
    assert config.buckets.prefill == (32, 1048576)
    assert config.kv_cache.tokens == 1073741824


def test_cache_dtype_is_the_models_unless_stated(tmp_path: Path) -> None:
    inherited = load(tmp_path, VALID, "model.dtype=bfloat16")
    assert inherited.cache_dtype == inherited.kv_cache.dtype == "bfloat16"
    assert load(tmp_path, VALID, "kv_cache.dtype=bfloat16").cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    "source",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "../m.gguf",
        "/models/a b",
        "package:tiny_models/data/m.gguf",
        "package:a.b/m.gguf",
    ],
)
def test_sources(tmp_path: Path, source: str) -> None:
    assert load(tmp_path, edit("models/tiny", source)).model.source == source


def test_configuration_is_frozen_and_hashable(tmp_path: Path) -> None:
    config = load(tmp_path, VALID)
    with pytest.raises(ValidationError, match="frozen"):
        config.output = "elsewhere"
    assert hash(config) == hash(load(tmp_path, VALID))


# Values of one key


@pytest.mark.parametrize(
    ("written", "shown", "action"),
    [
        ('"32"', '"32" (string)', "remove the quotes"),
        ("8k", '"8k" (string)', "write it as in block_size: 32"),
        ("true", "true (boolean)", "write it as in block_size: 32"),
        ("yes", "yes (boolean)", "write it as in block_size: 32"),
        ("32.0", "32.0 (float)", "write it as in block_size: 32"),
        ("2024-01-32", "2024-01-32 (date)", "write it as in block_size: 32"),
        ("", "empty (null)", "write it as in block_size: 32"),
        ("[]", "an empty list", "write it as in block_size: 32"),
        ("{a: 1}", "a mapping", "write it as in block_size: 32"),
        ("0o40", '"0o40" (string)', "write it as in block_size: 32"),
        ("040", "040 (integer not in plain decimal)", "write it as in block_size: 32"),
        ("0x20", "0x20 (integer not in plain decimal)", "write it as in block_size: 32"),
        ("1_024", "1_024 (integer not in plain decimal)", "write it as in block_size: 32"),
        ("1:30", "1:30 (integer not in plain decimal)", "write it as in block_size: 32"),
        ("0", "0", "write it as in block_size: 32"),
        ("-32", "-32", "write it as in block_size: 32"),
        ("1048577", "1048577", "write it as in block_size: 32"),
        ("9" * 4000, "9" * 77 + "...", "write it as in block_size: 32"),
    ],
)
def test_integer(faults: Faults, written: str, shown: str, action: str) -> None:
    assert faults(edit("block_size: 32", f"block_size: {written}")) == [
        f"c.yaml:10: kv_cache.block_size is {shown}; expected {BUCKET}; {action}"
    ]


@pytest.mark.parametrize(("written", "shown"), [("12", "12 (integer)"), ("no", "no (boolean)"), ("1.5", "1.5 (float)")])
def test_string(faults: Faults, written: str, shown: str) -> None:
    assert faults(edit("compiled/tiny", written)) == [
        f"c.yaml:11: output is {shown}; expected a path; put it in quotes"
    ]


def test_string_in_several_lines(faults: Faults) -> None:
    assert faults(edit("output: compiled/tiny", "output:\n  - a\n  - b")) == [
        "c.yaml:11: output is a list; expected a path; write it as in output: compiled/llama8b"
    ]


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ('""', 'is ""; expected a path; write it as in output: compiled/llama8b'),
        ('" "', 'is " "; expected a path; write it as in output: compiled/llama8b'),
        (
            "~/x",
            'is "~/x"; expected a path without a leading ~, which is not expanded here; write the folder in full',
        ),
        ('"a\\0b"', 'is "a\\u0000b"; expected a path without control characters; remove them'),
        ('"a\\nb"', 'is "a\\nb"; expected a path without control characters; remove them'),
    ],
)
def test_path(faults: Faults, written: str, fault: str) -> None:
    assert faults(edit("compiled/tiny", written)) == [f"c.yaml:11: output {fault}"]


@pytest.mark.parametrize(
    "source", ["package:", "package:a", "package:a/m.bin", "package:a/../m.gguf", "package:/m.gguf"]
)
def test_package_source(faults: Faults, source: str) -> None:
    assert faults(edit("models/tiny", f"'{source}'")) == [
        f'c.yaml:2: model.source is "{source}"; expected package:NAME/FILE.gguf, NAME an importable package and FILE '
        "below its folder; correct the name and the path"
    ]


@pytest.mark.parametrize(
    ("written", "shown", "action"),
    [
        ("bf16", '"bf16"', "did you mean bfloat16?"),
        ("int8", '"int8"', "write it as in dtype: bfloat16"),
        ("16", "16 (integer)", "write it as in dtype: bfloat16"),
    ],
)
def test_dtype(faults: Faults, written: str, shown: str, action: str) -> None:
    assert faults(edit("dtype: float32", f"dtype: {written}")) == [
        f"c.yaml:3: model.dtype is {shown}; expected float32 or bfloat16; {action}"
    ]


@pytest.mark.parametrize("target", ["trn2", "{platform: trn2}", "\n  platform: trn2"])
def test_platform(faults: Faults, target: str) -> None:
    line = 5 if "\n" in target else 4
    assert faults(edit("target: cpu", f"target: {target}")) == [
        f'c.yaml:{line}: target.platform is "trn2"; expected cpu, the only choice of this version; '
        "write it as in platform: cpu"
    ]


def test_isa(faults: Faults) -> None:
    assert faults(edit("target: cpu", "target: {isa: x86_64_v3}")) == [
        'c.yaml:4: target.isa is "x86_64_v3"; expected native, x86-64-v3 or x86-64-v4; did you mean x86-64-v3?'
    ]


def test_target_of_a_wrong_type(faults: Faults) -> None:
    assert faults(edit("target: cpu", "target: [cpu]")) == [
        "c.yaml:4: target is a list; expected a mapping with the keys platform, isa, or the platform alone; "
        "write it as in target: cpu"
    ]


@pytest.mark.parametrize("layout", ["tp0", "tp01", "tp", "tp4_sp", "TP4", "pp2", "tp4-sp ", "tp10000", "", "tp4-sp\\n"])
def test_layout_name(faults: Faults, layout: str) -> None:
    assert faults(edit("[tp1, tp4-sp]", f'\n  - tp1\n  - "{layout}"')) == [
        f'c.yaml:7: layouts[1] is "{layout}"; expected {LAYOUT}; write it as in layouts: [tp1, tp4-sp]'
    ]


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("tp1", 'is "tp1" (string); expected a list'),
        ("[]", "is an empty list; expected a list"),
        ("", "is empty (null); expected a list"),
    ],
)
def test_layouts_of_a_wrong_kind(faults: Faults, written: str, fault: str) -> None:
    assert faults(edit("[tp1, tp4-sp]", written)) == [
        f"c.yaml:5: layouts {fault} of one or more distinct names {LAYOUT}; write it as in layouts: [tp1, tp4-sp]"
    ]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[tp1, tp4-sp]", "[tp1, tp2, tp1]", f"5: layouts holds tp1 more than once; expected a list of one or more "
         f"distinct names {LAYOUT}; write each once"),
        ("[1, 4]", "[4, 1, 4, 1]", f"8: buckets.decode holds 1, 4 more than once; expected {BUCKETS}; write each once"),
    ],
)  # fmt: skip
def test_duplicates(faults: Faults, old: str, new: str, fault: str) -> None:
    assert faults(edit(old, new)) == [f"c.yaml:{fault}"]


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("[]", f"8: buckets.decode is an empty list; expected {BUCKETS}"),
        ("4", f"8: buckets.decode is 4 (integer); expected {BUCKETS}"),
        ("{a: 1}", f"8: buckets.decode is a mapping; expected {BUCKETS}"),
        ("[1, 0]", f"8: buckets.decode[1] is 0; expected {BUCKET}"),
        ("\n    - 1\n    - -4", f"10: buckets.decode[1] is -4; expected {BUCKET}"),
        ("[1048577]", f"8: buckets.decode[0] is 1048577; expected {BUCKET}"),
        ("[1, true]", f"8: buckets.decode[1] is true (boolean); expected {BUCKET}"),
        ("[[1]]", f"8: buckets.decode[0] is a list; expected {BUCKET}"),
    ],
)
def test_buckets(faults: Faults, written: str, fault: str) -> None:
    assert faults(edit("[1, 4]", written)) == [f"c.yaml:{fault}; write it as in decode: [1, 4, 16]"]


def test_section_of_a_wrong_type(faults: Faults) -> None:
    assert faults("buckets:\n" + edit(VALID[VALID.index("buckets:") : VALID.index("kv_cache:")], "")) == [
        "c.yaml:1: buckets is empty (null); expected a mapping with the keys prefill, decode, context; "
        "write it as in buckets: {prefill: [32, 128, 512], decode: [1, 4, 16], context: [512, 2048]}"
    ]


# Rules between keys


def test_prefill_bucket_that_no_context_can_hold(faults: Faults) -> None:
    assert faults(edit("[32, 128]", "\n  - 1024\n  - 512\n  - 513")) == [
        "c.yaml:8: buckets.prefill[0] is 1024, a bucket that no context can hold; "
        "expected at most the largest of buckets.context, 512; remove it, or add a context bucket that holds it",
        "c.yaml:10: buckets.prefill[2] is 513, a bucket that no context can hold; "
        "expected at most the largest of buckets.context, 512; remove it, or add a context bucket that holds it",
    ]


def test_context_bucket_that_is_not_whole_blocks(faults: Faults) -> None:
    assert faults(edit("[256, 512]", "[512, 100, 16]")) == [
        "c.yaml:9: buckets.context[1] is 100, not a whole number of cache blocks; "
        "expected a multiple of kv_cache.block_size, 32; write 96 or 128",
        "c.yaml:9: buckets.context[2] is 16, not a whole number of cache blocks; "
        "expected a multiple of kv_cache.block_size, 32; write 32",
    ]


def test_cache_tokens_that_are_not_whole_blocks(faults: Faults) -> None:
    assert faults(edit("tokens: 8192", "tokens: 8200")) == [
        "c.yaml:10: kv_cache.tokens is 8200, not a whole number of cache blocks; "
        "expected a multiple of kv_cache.block_size, 32; write 8192 or 8224"
    ]


def test_cache_smaller_than_the_largest_context(faults: Faults) -> None:
    assert faults(edit("tokens: 8192", "tokens: 480")) == [
        "c.yaml:10: kv_cache.tokens is 480, too few for one sequence of the largest context; "
        "expected at least the largest of buckets.context, 512; write at least 512"
    ]


def test_rules_between_sound_keys_are_told_beside_other_faults(faults: Faults) -> None:
    text = edit("tokens: 8192", "tokens: 480").replace("[1, 4]", "[one]").replace("block_size: 32", "block_size: 0")
    assert faults(text) == [
        f'c.yaml:8: buckets.decode[0] is "one" (string); expected {BUCKET}; write it as in decode: [1, 4, 16]',
        f"c.yaml:10: kv_cache.block_size is 0; expected {BUCKET}; write it as in block_size: 32",
        "c.yaml:10: kv_cache.tokens is 480, too few for one sequence of the largest context; "
        "expected at least the largest of buckets.context, 512; write at least 512",
    ]


def test_rules_use_the_default_of_an_absent_key(faults: Faults) -> None:
    assert faults(edit("block_size: 32, tokens: 8192", "tokens: 8200")) == [
        "c.yaml:10: kv_cache.tokens is 8200, not a whole number of cache blocks; "
        "expected a multiple of kv_cache.block_size, 32; write 8192 or 8224"
    ]


def test_rules_between_keys_hold_for_configurations_made_in_python() -> None:
    values = yaml.safe_load(edit("tokens: 8192", "tokens: 480"))
    with pytest.raises(ValidationError, match=r"kv_cache\.tokens is 480, too few for one sequence"):
        CompileConfig.model_validate(values)


@pytest.mark.parametrize("model", ["{dtype: float32}", "{}", "{source: null, config: ~}"])
def test_neither_source_nor_config(faults: Faults, model: str) -> None:
    assert faults(edit("model:\n  source: models/tiny\n  dtype: float32", f"model: {model}")) == [
        "c.yaml:1: model.config is missing, and so is model.source; expected one of the two; "
        "add source, or config to compile without weights"
    ]


# Documentation of the keys


def test_every_key_is_documented() -> None:
    docs = describe_keys()
    assert [(doc.path, doc.default) for doc in docs] == [
        ("model", "required"),
        ("model.source", "none"),
        ("model.config", "none"),
        ("model.dtype", "float32"),
        ("target", "{platform: cpu, isa: native}"),
        ("target.platform", "cpu"),
        ("target.isa", "native"),
        ("layouts", "[tp1]"),
        ("buckets", "required"),
        ("buckets.prefill", "required"),
        ("buckets.decode", "required"),
        ("buckets.context", "required"),
        ("kv_cache", "required"),
        ("kv_cache.block_size", "32"),
        ("kv_cache.tokens", "required"),
        ("kv_cache.dtype", "none"),
        ("output", "required"),
    ]
    assert all(doc.text.endswith(".") for doc in docs)
    types = {doc.path: doc.type for doc in docs}
    assert types["buckets.decode"] == BUCKETS
    assert types["layouts"] == f"a list of one or more distinct names {LAYOUT}"
    assert types["target"] == "a mapping with the keys platform, isa, or the platform alone"
    assert types["target.isa"] == "native, x86-64-v3 or x86-64-v4"
    assert types["kv_cache.dtype"] == "float32 or bfloat16"
    assert types["model.source"] == SOURCE


def test_examples_of_sections_make_a_valid_configuration() -> None:
    config = CompileConfig.model_validate({name: field.examples[0] for name, field in fields(CompileConfig).items()})
    assert config.layouts == ("tp1", "tp4-sp")


def test_examples_of_keys_make_a_valid_configuration() -> None:
    values = {
        name: {key: inner.examples[0] for key, inner in fields(field.annotation).items()}
        if issubclass(field.annotation, Section)
        else field.examples[0]
        for name, field in fields(CompileConfig).items()
        if isinstance(field.annotation, type)
    }
    assert list(values) == ["model", "target", "buckets", "kv_cache", "output"]
    config = CompileConfig.model_validate(values)
    assert (config.target.isa, config.buckets.context, config.cache_dtype) == ("x86-64-v3", (512, 2048), "bfloat16")


def fields(section: type[Section]) -> dict[str, Any]:
    return dict(section.model_fields)
