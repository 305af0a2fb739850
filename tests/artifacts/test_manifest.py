import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import manifest as manifest_module
from artifacts.errors import ArtifactError, CorruptArtifactError, FormatVersionError
from artifacts.manifest import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    EntryRecord,
    FileRecord,
    KvCacheRecord,
    LayoutRecord,
    Manifest,
    ModelRecord,
    ProgramRecord,
    TargetRecord,
    WeightRecord,
    decode_manifest,
    encode_manifest,
    manifest_digest,
    read_format_version,
)
from artifacts.signature import DTYPES, EntrySignature, TensorSpec
from tests.artifacts.example import build_example

positive = st.integers(1, 2**40)
dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(positive, max_size=4).map(tuple)
specs = st.builds(TensorSpec, name=st.text(), shape=shapes, dtype=dtypes)
texts = st.lists(st.text(), max_size=3).map(tuple)


def tuples(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, max_size=2).map(tuple)


signatures = st.builds(
    EntrySignature,
    name=st.text(),
    kind=st.sampled_from(["prefill", "decode"]),
    rows=positive,
    context=positive,
    inputs=tuples(specs),
    outputs=tuples(specs),
)
entries = st.builds(
    EntryRecord,
    signature=signatures,
    graph=st.text(),
    program=st.none() | st.builds(ProgramRecord, file=st.text(), requires=texts),
)
layouts = st.builds(
    LayoutRecord,
    name=st.text(),
    ranks=positive,
    caches=tuples(specs),
    parameters=tuples(specs),
    entries=tuples(entries),
)
models = st.builds(
    ModelRecord,
    architecture=st.text(),
    source=st.text(),
    dtype=dtypes,
    vocab_size=positive,
    hidden_size=positive,
    num_layers=positive,
    max_position_embeddings=positive,
    embedding=st.text(),
    eos_token_ids=tuples(st.integers(0, 2**31)),
)
file_records = st.builds(
    FileRecord, size=st.integers(0, 2**50), sha256=st.binary().map(lambda data: hashlib.sha256(data).hexdigest())
)
weights = st.builds(WeightRecord, file=st.text(), shape=shapes, dtype=dtypes)
manifests = st.builds(
    Manifest,
    format_version=st.just(FORMAT_VERSION),
    self_digest=st.just(""),
    toolchain=st.dictionaries(st.text(), st.text(), max_size=3),
    model=models,
    target=st.builds(TargetRecord, platform=st.text(), architecture=st.text(), isa=st.text()),
    kv_cache=st.builds(KvCacheRecord, block_size=positive, blocks=positive, dtype=dtypes),
    layouts=tuples(layouts),
    weights=st.none() | st.dictionaries(st.text(), weights, max_size=3),
    files=st.dictionaries(st.text(), file_records, max_size=3),
)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("example")
    build_example(folder)
    return (folder / "manifest.json").read_bytes()


def decode(data: bytes) -> Manifest:
    return decode_manifest(data, "m.json")


def seal(content: dict[str, Any]) -> bytes:
    """The canonical form, as artifacts/FORMAT.md defines it, with the standard library alone."""

    def canonical(digest: str) -> bytes:
        text = json.dumps({**content, "self_digest": digest}, sort_keys=True, indent=1, ensure_ascii=False)
        return (text + "\n").encode()

    return canonical(hashlib.sha256(canonical("")).hexdigest())


@settings(max_examples=60, deadline=None)
@given(manifests, st.randoms(use_true_random=False))
def test_round_trip(manifest: Manifest, random: Random) -> None:
    data = encode_manifest(manifest)
    read = decode(data)
    assert read == msgspec.structs.replace(manifest, self_digest=manifest_digest(manifest))
    assert encode_manifest(read) == data
    assert seal(json.loads(data)) == data
    other = msgspec.structs.replace(
        manifest,
        toolchain=shuffled(manifest.toolchain, random),
        files=shuffled(manifest.files, random),
        weights=manifest.weights and shuffled(manifest.weights, random),
    )
    assert encode_manifest(other) == data


def shuffled(mapping: dict[str, Any], random: Random) -> dict[str, Any]:
    """The same mapping, filled in another order."""
    return {key: mapping[key] for key in random.sample(sorted(mapping), len(mapping))}


def test_every_flipped_byte_is_caught(example: bytes) -> None:
    version = example.index(b'"format_version": ') + len('"format_version": ')
    assert decode(example)
    for position in range(len(example)):
        damaged = bytearray(example)
        damaged[position] ^= 1 << position % 8
        # a damaged version that still is a number cannot be told from another version; both are refused
        refusal = (
            FormatVersionError if position == version and chr(damaged[position]).isdigit() else CorruptArtifactError
        )
        with pytest.raises(refusal):
            decode(bytes(damaged))


def test_every_truncation_is_caught(example: bytes) -> None:
    for length in range(len(example)):
        with pytest.raises(CorruptArtifactError):
            decode(example[:length])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_escapes_or_raises_anything_else(example: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(example)))
    end = data.draw(st.integers(start, min(start + 40, len(example))))
    damaged = example[:start] + data.draw(st.binary(max_size=40)) + example[end:]
    if damaged != example:
        with pytest.raises(ArtifactError):
            decode(damaged)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_other_value_at_any_place_raises_anything_else(example: bytes, data: st.DataObject) -> None:
    content = json.loads(example)
    place: Any = content
    key: Any = data.draw(st.sampled_from(sorted(set(content) - {"format_version", "self_digest"})))
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(json_values)
    try:
        decode(seal(content))
    except CorruptArtifactError:
        pass
    else:
        assert seal(content) == encode_manifest(decode(seal(content)))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "Input data was truncated"),
        (b"PK\x03\x04", "JSON is malformed: invalid character (byte 0)"),
        (b"\xef\xbb\xbf{}", "JSON is malformed: invalid character (byte 0)"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field `format_version`"),
        (b'{"name": "app", "manifest_version": 3}', "Object missing required field `format_version`"),
        (b'{"format_version": 1}', "Object missing required field `self_digest`"),
        (b'{"format_version": "1", "self_digest": ""}', "Expected `int`, got `str` - at `$.format_version`"),
        (b'{"format_version": 1.5, "self_digest": ""}', "Expected `int`, got `float` - at `$.format_version`"),
        (b'{"format_version": true, "self_digest": ""}', "Expected `int`, got `bool` - at `$.format_version`"),
        (b'{"format_version": 1, "self_digest": ""}', "Object missing required field `toolchain`"),
        (b'{"format_version": 1, "self_digest": "\xff"}', "Invalid UTF-8 encoded string"),
        (
            b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "maximum recursion depth exceeded while deserializing an object",
        ),
        (
            b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
            "maximum recursion depth exceeded while deserializing an object",
        ),
    ],
)
def test_what_is_not_a_manifest(data: bytes, fault: str) -> None:
    with pytest.raises(CorruptArtifactError) as caught:
        decode(data)
    assert str(caught.value) == (
        f"m.json is not a manifest ({fault}); expected the JSON that artifacts/FORMAT.md describes; "
        "restore the file or rebuild the artifact"
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.update(extra=1), "Object contains unknown field `extra`"),
        (lambda m: m["model"].update(extra=1), "Object contains unknown field `extra` - at `$.model`"),
        (lambda m: m["model"].pop("embedding"), "Object missing required field `embedding` - at `$.model`"),
        (lambda m: m["model"].update(hidden_size=0), "Expected `int` >= 1 - at `$.model.hidden_size`"),
        (lambda m: m["model"].update(eos_token_ids=[-1]), "Expected `int` >= 0 - at `$.model.eos_token_ids[0]`"),
        (
            lambda m: m["kv_cache"].update(dtype="float64"),
            "dtype 'float64' is none of float32, bfloat16, int32, bool - at `$.kv_cache`",
        ),
        (
            lambda m: m["layouts"][0]["caches"][0].update(shape=[5, 0, 4, 2]),
            "shape [5, 0, 4, 2] has an extent that is not positive - at `$.layouts[0].caches[0]`",
        ),
        (
            lambda m: m["weights"]["lm_head.weight"].update(shape=[7, -3]),
            "shape [7, -3] has an extent that is not positive - at `$.weights[...]`",
        ),
        (
            lambda m: m["layouts"][0]["entries"][0]["signature"].update(kind="encode"),
            "Invalid enum value 'encode' - at `$.layouts[0].entries[0].signature.kind`",
        ),
        (lambda m: m["files"]["config.yaml"].update(size=-1), "Expected `int` >= 0 - at `$.files[...].size`"),
        (
            lambda m: m["files"]["config.yaml"].update(sha256="0" * 64 + "\n"),
            "Expected `str` matching regex '^[0-9a-f]{64}\\\\Z' - at `$.files[...].sha256`",
        ),
    ],
)
def test_what_the_schema_refuses(example: bytes, change: Any, fault: str) -> None:
    content = json.loads(example)
    change(content)
    with pytest.raises(CorruptArtifactError) as caught:
        decode(seal(content))
    assert caught.value.found == f"m.json is not a manifest ({fault})"


NOT_CANONICAL = (
    "m.json is not in canonical form, or its digest disagrees with its content; "
    "expected the bytes that aot-compile wrote; restore the file or rebuild the artifact"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"hidden_size": 3', b'"hidden_size": 4'),
        (b'"self_digest": "', b'"self_digest": "0'),
        (b'"hidden_size": 3', b'"hidden_size":  3'),
        (b'"hidden_size": 3', b'"hidden_size": 4,\n  "hidden_size": 3'),  # the last of two keys is the true one
        (b'"hidden_size": 3', b'"hidden_size": 3,\n  "hidden_size": 3'),
        (b'"format_version": 1', b'"format_version": 2,\n "format_version": 1'),
        (b'"files": {', b'"files": {},\n "files": {'),
        (b'"tiny"', b'"t\\u0069ny"'),
        (b"\n}\n", b"\n}"),
        (b"\n}\n", b"\n}\n\n"),
        (b"\n", b"\r\n"),
    ],
)
def test_any_other_spelling_is_refused(example: bytes, before: bytes, after: bytes) -> None:
    assert before in example
    with pytest.raises(CorruptArtifactError) as caught:
        decode(example.replace(before, after))
    assert str(caught.value) == NOT_CANONICAL


def test_two_keys_of_which_the_last_is_another_version() -> None:
    with pytest.raises(FormatVersionError):
        decode(b'{"format_version": 1, "format_version": 2, "self_digest": ""}')


@pytest.mark.parametrize("version", [0, -1, 2, 10**30])
def test_another_version_is_told_whatever_else_the_manifest_holds(example: bytes, version: int) -> None:
    content = json.loads(example)
    later = {
        "format_version": version,
        "self_digest": "of another kind",
        "model": "declared in another way",
        "a field": [{"from": "the future"}],
        "files": content["files"],
    }
    data = json.dumps(later).encode()  # nor need it be in today's canonical form
    with pytest.raises(FormatVersionError) as caught:
        decode(data)
    assert str(caught.value) == (
        f"m.json has format version {version}; expected version 1, which this package reads; "
        "use the release of aot-compiler that wrote it, or rebuild the artifact"
    )
    assert read_format_version(data, "m.json") == version


def test_the_written_manifest_is_the_one_that_was_given(tmp_path: Path) -> None:
    manifest = build_example(tmp_path)
    assert decode((tmp_path / "manifest.json").read_bytes()) == msgspec.structs.replace(
        manifest, self_digest=manifest_digest(manifest)
    )


def test_the_page_describes_every_field() -> None:
    page = Path(manifest_module.__file__).with_name("FORMAT.md").read_text()
    assert f"# The artifact format, version {FORMAT_VERSION}\n" in page
    assert f"{MAX_MANIFEST_BYTES // 2**20} MiB" in page
    structs = [value for value in vars(manifest_module).values() if isinstance(value, type)]
    fields = {field for struct in structs if issubclass(struct, msgspec.Struct) for field in struct.__struct_fields__}
    assert {"format_version", "eos_token_ids", "inputs", "sha256"} <= fields
    assert [field for field in sorted(fields) if f"`{field}`" not in page] == []
