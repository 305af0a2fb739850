import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_compiler.config import CompileConfig, describe_keys
from aot_compiler.config_file import dump_config, load_config, resolve_path
from artifacts.errors import ConfigError
from tests.aot_compiler.small_config import BUCKET, BUCKETS, LAYOUT, SOURCE, TOP, VALID, Faults, edit, load

# What is accepted


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + VALID.replace("\n", "\r\n")) == load(tmp_path, VALID)


def test_loaded_config_knows_where_relative_paths_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/c.yaml").write_text(VALID)
    monkeypatch.chdir(tmp_path)
    loaded = load_config(Path("configs/c.yaml"))
    assert loaded.path == Path("configs/c.yaml")
    assert loaded.search == (tmp_path / "configs", tmp_path)


# Paths


def test_resolve_path_prefers_the_first_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "both").touch()
    (second / "one").touch()
    assert resolve_path("both", (first, second)) == first / "both"
    assert resolve_path("one", (first, second)) == second / "one"
    assert resolve_path(str(second / "one"), (first,)) == second / "one"


@pytest.mark.parametrize("value", ["none", "~", "a\0b", "x" * 5000, "/none/at/all"])
def test_resolve_path_of_nothing(tmp_path: Path, value: str) -> None:
    assert resolve_path(value, (tmp_path,)) is None


# Overrides


def test_overrides_replace_values(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        VALID,
        "buckets.decode=[8,1]",
        "layouts=[tp1,tp8]",
        "kv_cache={block_size: 16, tokens: 512}",
        "model.config=c.json",
        "model.source=null",
    )
    assert config.buckets.decode == (1, 8)
    assert config.buckets.prefill == (32, 128)
    assert config.layouts == ("tp1", "tp8")
    assert (config.kv_cache.block_size, config.kv_cache.tokens) == (16, 512)
    assert (config.model.source, config.model.config) == (None, "c.json")


def test_override_of_a_key_below_a_shorthand(tmp_path: Path) -> None:
    config = load(tmp_path, VALID, "target.platform=cpu", "target.isa=x86-64-v3")
    assert (config.target.platform, config.target.isa) == ("cpu", "x86-64-v3")
    assert load(tmp_path, VALID, "target.isa=x86-64-v3") == config


def test_override_makes_an_absent_section(tmp_path: Path) -> None:
    text = edit("kv_cache: {block_size: 32, tokens: 8192}\n", "").replace("target: cpu\n", "")
    config = load(tmp_path, text, "kv_cache.tokens=512", "target.isa=x86-64-v4")
    assert (config.kv_cache.tokens, config.target.isa) == (512, "x86-64-v4")


def test_the_later_of_two_overrides_counts(tmp_path: Path) -> None:
    assert load(tmp_path, VALID, "output=a", "output=b=c").output == "b=c"


def test_override_cures_a_fault_of_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, edit("[1, 4]", "[one]"), "buckets.decode=[1]").buckets.decode == (1,)


def test_override_without_an_equals_sign(faults: Faults) -> None:
    assert faults(VALID, "buckets.decode") == [
        "--set buckets.decode: has no =; expected KEY=VALUE, VALUE in YAML; write it as in --set buckets.decode=[1,8]"
    ]


@pytest.mark.parametrize(
    ("override", "key", "action"),
    [
        ("buckets.decod=[1]", "buckets.decod", "did you mean buckets.decode?"),
        ("quantization=int8", "quantization", "remove it"),
        ("output.x=3", "output.x", "did you mean output?"),
        ("=3", "(empty)", "remove it"),
    ],
)
def test_override_of_an_unknown_key(faults: Faults, override: str, key: str, action: str) -> None:
    known = ", ".join(doc.path for doc in describe_keys())
    assert faults(VALID, override) == [f"--set {override}: unknown key {key}; expected one of {known}; {action}"]


def test_override_that_is_not_yaml(faults: Faults) -> None:
    assert faults(VALID, "layouts=[tp1") == [
        "--set layouts=[tp1: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; "
        "expected valid YAML; correct the text there"
    ]


def test_override_of_a_wrong_value(faults: Faults) -> None:
    assert faults(VALID, "buckets.decode=[1, 2.0]") == [
        f"--set buckets.decode=[1, 2.0]: buckets.decode[1] is 2.0 (float); expected {BUCKET}; "
        "write it as in decode: [1, 4, 16]"
    ]


def test_override_that_breaks_a_rule_between_keys(faults: Faults) -> None:
    assert faults(VALID, "kv_cache.tokens=100") == [
        "--set kv_cache.tokens=100: kv_cache.tokens is 100, too few for one sequence of the largest context; "
        "expected at least the largest of buckets.context, 512; write at least 512"
    ]


def test_override_with_a_duplicate_key(faults: Faults) -> None:
    assert faults(VALID, "kv_cache={tokens: 512, tokens: 512}") == [
        "--set kv_cache={tokens: 512, tokens: 512}: key tokens is written twice; expected each key once; "
        "remove one of the two"
    ]


def test_override_below_a_section_that_is_not_a_mapping(faults: Faults) -> None:
    assert faults(edit("{block_size: 32, tokens: 8192}", "8192"), "kv_cache.tokens=512") == [
        "c.yaml:10: kv_cache is 8192 (integer); expected a mapping with the keys block_size, tokens, dtype; "
        "write it as in kv_cache: {block_size: 32, tokens: 8192}"
    ]


def test_long_override_is_shown_cut_and_on_one_line(faults: Faults) -> None:
    override = "layouts=\n- tp0" + " " * 100
    shown = ("layouts=\n- tp0" + " " * 63 + "...").replace("\n", "\\n")
    assert faults(VALID, override) == [
        f'--set {shown}: layouts[0] is "tp0"; expected {LAYOUT}; write it as in layouts: [tp1, tp4-sp]'
    ]


# Files that cannot be read


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: no such file; expected a YAML file; check the path"
    assert caught.value.faults == [caught.value]


def test_file_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a folder; expected a YAML file; name the file inside it"


@pytest.mark.parametrize(
    ("name", "shown", "reason"),
    [("c.yaml/d.yaml", "c.yaml/d.yaml", "Not a directory"), ("a\0b", "a\\x00b", "embedded null byte")],
)
def test_file_that_cannot_be_opened(tmp_path: Path, name: str, shown: str, reason: str) -> None:
    (tmp_path / "c.yaml").write_text(VALID)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path}/{shown}: cannot be read ({reason}); expected a YAML file; check the path and its permissions"
    )


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError) as caught:
        load_config(Path("c.yaml"))
    assert str(caught.value) == (
        "the working directory no longer exists; expected a working directory to look for relative paths in; "
        "change to a folder that exists"
    )


def test_override_faults_are_told_beside_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.yaml", ["output"])
    assert str(caught.value).split("\n") == [
        f"{tmp_path}/none.yaml: no such file; expected a YAML file; check the path",
        "--set output: has no =; expected KEY=VALUE, VALUE in YAML; write it as in --set buckets.decode=[1,8]",
    ]


def test_not_utf8(faults: Faults) -> None:
    assert faults(b"model:\n  source: caf\xe9\n") == [
        "c.yaml:2: byte 0xe9 is not UTF-8; expected a YAML file in UTF-8; save the file as UTF-8"
    ]


def test_too_large(faults: Faults) -> None:
    assert faults("#" * 65537) == [
        "c.yaml: holds more than 65536 bytes; expected a YAML file of at most 65536 bytes; "
        "check that the path is that of the configuration"
    ]


# Text that is not a mapping in YAML


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "---", "null"])
def test_empty_file(faults: Faults, text: str) -> None:
    assert faults(text) == [
        f"c.yaml:1: the file is empty; expected a mapping with the keys {TOP}; write each key, a colon and its value"
    ]


@pytest.mark.parametrize(("text", "found"), [("\n- model\n", "a list"), ("\nmodel\n", '"model" (string)')])
def test_top_level_is_not_a_mapping(faults: Faults, text: str, found: str) -> None:
    assert faults(text) == [
        f"c.yaml:2: the top level is {found}; expected a mapping with the keys {TOP}; "
        "write each key, a colon and its value"
    ]


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("model:\n\tsource: x\n", 2, "found character '\\t' that cannot start any token"),
        ("model: a: b\n", 1, "mapping values are not allowed here"),
        ("a: 1\nb: [1,\nc: 2\n", 4, "expected ',' or ']', but got '<stream end>'"),
        ("a: 'b\n\nc\n", 4, "found unexpected end of stream"),
        ("a: 1\n---\nb: 1\n", 2, "but found another document"),
        ("a: %b\n", 1, "found character '%' that cannot start any token"),
    ],
)
def test_not_yaml(faults: Faults, text: str, line: int, found: str) -> None:
    (fault,) = faults(text)
    assert fault.startswith(f"c.yaml:{line}: not YAML: ")
    assert fault.endswith(f"{found}; expected valid YAML; correct the text there")


def test_not_yaml_tells_where_an_open_bracket_stands(faults: Faults) -> None:
    assert faults("layouts: [tp1,\noutput: x: y\n") == [
        "c.yaml:2: not YAML: while parsing a flow sequence that begins on line 1, expected ',' or ']', but got ':'; "
        "expected valid YAML; correct the text there"
    ]


def test_nul_byte(faults: Faults) -> None:
    assert faults("model:\n  source: a\0b\n") == [
        "c.yaml:2: character U+0000 is not allowed in YAML; expected valid YAML; correct the text there"
    ]


@pytest.mark.parametrize("text", ['a: "\\UFFFFFFFF"', "%YAML 1." + "9" * 5000 + "\n---\na: 1"])
def test_numbers_that_pyyaml_cannot_hold(faults: Faults, text: str) -> None:
    assert faults(text) == [
        "c.yaml:1: not YAML: a number or an escape is out of range; expected valid YAML; correct the text there"
    ]


@pytest.mark.parametrize("text", ["[" * 10000, "{a: " * 5000, "- " * 10000 + "1", "? " * 10000])
def test_endless_nesting(faults: Faults, text: str) -> None:
    assert faults(text) == [
        "c.yaml:1: not YAML: more than 16 levels of mappings and lists; expected valid YAML; correct the text there"
    ]


# YAML that is more than plain values


def test_duplicate_key(faults: Faults) -> None:
    assert faults(VALID + "layouts: [tp2]\n") == [
        "c.yaml:12: key layouts is written twice, first on line 5; expected each key once; remove one of the two"
    ]


def test_duplicate_key_in_a_section(faults: Faults) -> None:
    assert faults(edit("  decode: [1, 4]\n", "  decode: [1, 4]\n  prefill: [32]\n")) == [
        "c.yaml:9: key buckets.prefill is written twice, first on line 7; expected each key once; remove one of the two"
    ]


def test_list_as_a_key(faults: Faults) -> None:
    assert faults(VALID + "[a, b]: 1\n") == [
        "c.yaml:12: a list or a mapping stands as a key; expected a word as key; write the key as one word"
    ]


def test_key_that_is_not_unicode(faults: Faults) -> None:
    assert faults(VALID + '"\\ud800": 1\n') == [
        'c.yaml:12: key "\\ud800" is not Unicode; expected a word as key; write the key as one word'
    ]


def test_alias(faults: Faults) -> None:
    text = edit("prefill: [32, 128]", "prefill: &sizes [32, 128]").replace("decode: [1, 4]", "decode: *sizes")
    assert faults(text) == [
        f"c.yaml:8: buckets.decode is *sizes (alias); expected {BUCKETS}; write the value itself in place of the alias"
    ]


def test_alias_bomb_is_not_expanded(faults: Faults) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
    assert len([fault for fault in faults(bomb) if "unknown key" in fault]) == 64


def test_tags_make_no_objects(faults: Faults, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    text = edit("source: models/tiny", f"source: !!python/object/apply:pathlib.Path.touch ['{witness}']")
    assert faults(text.replace("compiled/tiny", "!mine x")) == [
        f"c.yaml:2: model.source is !!python/object/apply:pathlib.Path.touch (tag); expected {SOURCE}; "
        "write a plain value without a tag",
        "c.yaml:11: output is !mine (tag); expected a path; write a plain value without a tag",
    ]
    assert not witness.exists()


def test_string_that_is_not_unicode(faults: Faults) -> None:
    assert faults(edit("compiled/tiny", '"\\ud800"')) == [
        "c.yaml:11: output is \\ud800 (not Unicode); expected a path; remove the escape of half a character"
    ]


# Keys


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("layouts:", "layout:", f"5: unknown key layout; expected one of {TOP}; did you mean layouts?"),
        (
            "  dtype:",
            "  dtyp:",
            "3: unknown key model.dtyp; expected one of source, config, dtype; did you mean dtype?",
        ),
        (
            "target: cpu",
            "target: {platform: cpu, lnc: 2}",
            "4: unknown key target.lnc; expected one of platform, isa; remove it",
        ),
        (
            "target: cpu",
            "target: cpu\nblock_size: 3",
            f"5: unknown key block_size; expected one of {TOP}; did you mean kv_cache.block_size?",
        ),
        ("target: cpu", 'target: cpu\n"a b": 3', f'5: unknown key "a b"; expected one of {TOP}; remove it'),
        ("target: cpu", "target: cpu\n1: 3", f"5: unknown key 1; expected one of {TOP}; remove it"),
        ("target: cpu", "target: cpu\n<<: {a: 3}", f'5: unknown key "<<"; expected one of {TOP}; remove it'),
    ],
)
def test_unknown_key(faults: Faults, old: str, new: str, fault: str) -> None:
    assert faults(edit(old, new)) == [f"c.yaml:{fault}"]


def test_missing_keys(faults: Faults) -> None:
    assert faults("# tiny\nlayouts: [tp1]\nkv_cache:\n  block_size: 32\n") == [
        "c.yaml:2: key model is missing; expected a mapping with the keys source, config, dtype; "
        "add model: {source: meta-llama/Llama-3.1-8B-Instruct}",
        "c.yaml:2: key buckets is missing; expected a mapping with the keys prefill, decode, context; "
        "add buckets: {prefill: [32, 128, 512], decode: [1, 4, 16], context: [512, 2048]}",
        "c.yaml:2: key output is missing; expected a path; add output: compiled/llama8b",
        "c.yaml:3: key kv_cache.tokens is missing; expected an integer from 1 to 1073741824; add tokens: 8192",
    ]


REQUIRED = [doc.path for doc in describe_keys() if doc.default == "required"]


@pytest.mark.parametrize("path", [*REQUIRED, "model.source"])
def test_a_misspelt_required_key_is_one_fault(faults: Faults, path: str) -> None:
    key = path.split(".")[-1]
    (fault,) = faults(VALID.replace(f"{key}:", f"{key}_:", 1))
    assert f": unknown key {path}_; expected one of " in fault
    assert fault.endswith(f"; did you mean {key}?")


def test_a_missing_key_is_told_beside_an_unknown_key_that_is_like_another(faults: Faults) -> None:
    text = edit("output: compiled/tiny\n", "").replace("layouts:", "layout:")
    assert faults(text.replace("source: models/tiny\n  dtype:", "dtyp:")) == [
        "c.yaml:1: model.config is missing, and so is model.source; expected one of the two; "
        "add source, or config to compile without weights",
        "c.yaml:1: key output is missing; expected a path; add output: compiled/llama8b",
        "c.yaml:2: unknown key model.dtyp; expected one of source, config, dtype; did you mean dtype?",
        f"c.yaml:4: unknown key layout; expected one of {TOP}; did you mean layouts?",
    ]


# All at once


def test_all_faults_in_line_order_then_those_of_overrides(faults: Faults) -> None:
    text = """\
output: ~/out
output: twice
kv_cache: {block_size: 32, tokens: 8k}
buckets:
  context: [500]
  prefil: [32]
  decode: [1, "4"]
target: tpu
model:
  dtype: fp8
  source: 3
"""
    assert faults(text, "layouts=[tp0]", "nothing") == [
        'c.yaml:1: output is "~/out"; expected a path without a leading ~, which is not expanded here; '
        "write the folder in full",
        "c.yaml:2: key output is written twice, first on line 1; expected each key once; remove one of the two",
        'c.yaml:3: kv_cache.tokens is "8k" (string); expected an integer from 1 to 1073741824; '
        "write it as in tokens: 8192",
        "c.yaml:5: buckets.context[0] is 500, not a whole number of cache blocks; "
        "expected a multiple of kv_cache.block_size, 32; write 480 or 512",
        "c.yaml:6: unknown key buckets.prefil; expected one of prefill, decode, context; did you mean prefill?",
        f'c.yaml:7: buckets.decode[1] is "4" (string); expected {BUCKET}; remove the quotes',
        'c.yaml:8: target.platform is "tpu"; expected cpu, the only choice of this version; '
        "write it as in platform: cpu",
        'c.yaml:10: model.dtype is "fp8"; expected float32 or bfloat16; write it as in dtype: bfloat16',
        f"c.yaml:11: model.source is 3 (integer); expected {SOURCE}; put it in quotes",
        "--set nothing: has no =; expected KEY=VALUE, VALUE in YAML; write it as in --set buckets.decode=[1,8]",
        f'--set layouts=[tp0]: layouts[0] is "tp0"; expected {LAYOUT}; write it as in layouts: [tp1, tp4-sp]',
    ]


# Properties


def test_dump_is_canonical_yaml(tmp_path: Path) -> None:
    text = """\
model: {source: models/tiny, dtype: float32}
target: {platform: cpu, isa: native}
layouts: [tp1, tp4-sp]
buckets:
  prefill: [32, 128]
  decode: [1, 4]
  context: [256, 512]
kv_cache: {block_size: 32, tokens: 8192, dtype: float32}
output: compiled/tiny
"""
    assert dump_config(load(tmp_path, VALID)) == text
    assert dump_config(load(tmp_path, text)) == text


def is_path(text: str) -> bool:
    return bool(text.strip()) and not text.startswith(("~", "package:"))


PATHS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=200).filter(
    is_path
) | st.sampled_from(
    [
        "no",
        "null",
        "12",
        "0x1f",
        "1e3",
        "2024-01-01",
        "*a",
        "&a",
        "!!int 3",
        "a: b",
        "a #b",
        "- a",
        "'",
        "<<",
        "=",
        "x" * 300,
    ]
)
DTYPES = st.sampled_from(["float32", "bfloat16"])


def buckets(largest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, largest), min_size=1, max_size=6, unique=True)


@st.composite
def configs(draw: st.DrawFn) -> CompileConfig:
    block_size = draw(st.integers(1, 512))
    context = [n * block_size for n in draw(buckets(2**20 // block_size))]
    most = max(context) // block_size
    model = draw(st.fixed_dictionaries({"source": PATHS, "config": PATHS | st.none(), "dtype": DTYPES}))
    values = {
        "model": model if model["config"] is None or draw(st.booleans()) else model | {"source": None},
        "target": {"isa": draw(st.sampled_from(["native", "x86-64-v3", "x86-64-v4"]))},
        "layouts": draw(st.lists(st.from_regex(r"tp[1-9][0-9]{0,3}(-sp)?", fullmatch=True), min_size=1, unique=True)),
        "buckets": {"prefill": draw(buckets(max(context))), "decode": draw(buckets(2**20)), "context": context},
        "kv_cache": {
            "block_size": block_size,
            "tokens": block_size * draw(st.integers(most, 2**30 // block_size)),
            "dtype": draw(DTYPES | st.none()),
        },
        "output": draw(PATHS),
    }
    return CompileConfig.model_validate(values)


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_dump_round_trips(config: CompileConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = dump_config(config)
    loaded = load(tmp_path_factory.getbasetemp(), text)
    assert loaded == config
    assert dump_config(loaded) == text


LINE = re.compile(r"(c\.yaml(:(?P<line>\d+))?|--set .*): .+; expected .+; .+")


def outcome(folder: Path, content: bytes, overrides: list[str]) -> CompileConfig | ConfigError:
    (folder / "c.yaml").write_bytes(content)
    try:
        return load_config(folder / "c.yaml", overrides).config
    except ConfigError as error:
        return error


def check_any_input(folder: Path, content: bytes, overrides: list[str]) -> None:
    """Loading ends in a configuration that round-trips, or in faults of the promised form and order."""
    result = outcome(folder, content, overrides)
    if isinstance(result, CompileConfig):
        assert load(folder, dump_config(result)) == result
        return
    lines = str(result).replace(str(folder / "c.yaml"), "c.yaml").split("\n")
    assert len(lines) == len(result.faults)
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    numbers = [int(match["line"]) for match in matches if match and match["line"]]
    assert numbers == sorted(numbers)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=120))
def test_random_bytes(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_input(tmp_path_factory.getbasetemp(), content, [])


WORDS = """
    model source config dtype target platform isa cpu layouts tp1 buckets prefill decode context kv_cache block_size
    tokens output 1 32 -1 1.5 010 9999999 true null 2024-01-01
    !!int !!set !x &a *a << --- ... %YAML %TAG "\\ud800" "\\0" '' ""
"""
CHARACTERS = [*" \n\t\r~[]{}?:,-|>&*!=%@`#'\"\\\u2028\ud7ff\ue000\U0001f600\x85\x00\ufeff", "\n  ", ": ", "- "]
TOKENS = st.sampled_from(WORDS.split()) | st.sampled_from(CHARACTERS)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(TOKENS, max_size=40))
def test_random_tokens(tokens: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_input(tmp_path_factory.getbasetemp(), "".join(tokens).encode(), [])


OVERRIDES = st.builds(
    lambda key, tokens: f"{key}={''.join(tokens)}",
    st.sampled_from([doc.path for doc in describe_keys()] + ["", "x", "output.x", "..", "\udcff"]),
    st.lists(TOKENS, max_size=5),
)


@settings(max_examples=200, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 12), st.lists(TOKENS, max_size=3)), max_size=4),
    overrides=st.lists(OVERRIDES, max_size=2),
)
def test_mutations_of_a_valid_file(
    edits: list[tuple[int, int, list[str]]], overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = VALID
    for start, length, tokens in edits:
        text = text[:start] + "".join(tokens) + text[start + length :]
    check_any_input(tmp_path_factory.getbasetemp(), text.encode(), overrides)
