import hashlib
import io
import json
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import CorruptArtifactError
from artifacts.manifest import FileRecord
from artifacts.safetensors_file import MAX_HEADER_BYTES, map_tensors, write_tensors
from artifacts.signature import DTYPES, TensorSpec

SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "bool": "BOOL"}
specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("__")),
        shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
        dtype=st.sampled_from(sorted(DTYPES)),
    ),
    unique_by=lambda spec: spec.name,
    max_size=6,
)


def random_tensors(specs: list[TensorSpec], seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def tensor(spec: TensorSpec) -> np.ndarray:
        if spec.dtype == "bool":
            return generator.integers(0, 2, spec.shape).astype(np.bool_)
        data = generator.integers(0, 256, spec.nbytes, dtype=np.uint8)  # any bits: NaN, infinities, subnormals
        return data.view(spec.numpy_dtype).reshape(spec.shape)

    return {spec.name: tensor(spec) for spec in specs}


def bits(array: np.ndarray) -> tuple[tuple[int, ...], np.dtype, bytes]:
    return array.shape, array.dtype, array.tobytes()


def write(path: Path, specs: list[TensorSpec], tensors: dict[str, np.ndarray]) -> FileRecord:
    with path.open("wb") as file:
        return write_tensors(file, specs, tensors.__getitem__)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "w.safetensors"


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(0, 2**32 - 1))
def test_round_trip(path: Path, specs: list[TensorSpec], seed: int) -> None:
    tensors = random_tensors(specs, seed)
    record = write(path, specs, tensors)
    data = path.read_bytes()
    assert record.size == len(data)

    # as the safetensors library reads and validates it (it refuses holes and overlaps)
    read = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert set(tensors) == {name for name in read if not name.startswith("__pad")}
    for spec in specs:
        assert read[spec.name]["dtype"] == SAFETENSORS_DTYPES[spec.dtype]
        assert tuple(read[spec.name]["shape"]) == spec.shape
        assert bytes(read[spec.name]["data"]) == tensors[spec.name].tobytes()
    for name in set(read) - set(tensors):
        assert read[name]["dtype"] == "U8"
        assert bytes(read[name]["data"]) == bytes(read[name]["shape"][0])

    # as the format counts it
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for spec in specs:
        assert (start + header[spec.name]["data_offsets"][0]) % 64 == 0
    assert len(data) % 64 == 0
    assert len(data) < 64 * (2 * len(specs) + 1) + start + sum(spec.nbytes for spec in specs)

    # as we map it, whole and in part
    assert {name: bits(tensor) for name, tensor in map_tensors(path, specs).items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    assert list(map_tensors(path, specs[1:])) == list(tensors)[1:]


def test_the_numpy_binding_reads_it(path: Path) -> None:
    specs = [
        TensorSpec(name="a", shape=(3, 5), dtype="float32"),
        TensorSpec(name="b", shape=(7,), dtype="int32"),
        TensorSpec(name="c", shape=(), dtype="float32"),
    ]
    tensors = random_tensors(specs)
    write(path, specs, tensors)
    with safetensors.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == ["__pad.0", "__pad.1", "__pad.2", "a", "b", "c"]
        assert all(bits(file.get_tensor(name)) == bits(tensors[name]) for name in tensors)


def test_bytes_are_a_function_of_the_tensors() -> None:
    specs = [TensorSpec(name="a", shape=(3,), dtype="float32"), TensorSpec(name="b", shape=(16,), dtype="float32")]
    out = io.BytesIO()
    record = write_tensors(out, specs, lambda name: np.full(3 if name == "a" else 16, 1.5, np.float32))
    header = (
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"__pad.0":{"dtype":"U8","shape":[52],'
        b'"data_offsets":[12,64]},"b":{"dtype":"F32","shape":[16],"data_offsets":[64,128]}}'
    )
    start = (8 + len(header) + 63) // 64 * 64
    assert out.getvalue() == (
        (start - 8).to_bytes(8, "little")
        + header.ljust(start - 8)
        + np.full(3, 1.5, np.float32).tobytes()
        + bytes(52)
        + np.full(16, 1.5, np.float32).tobytes()
    )
    assert record.size == start + 128
    assert record.sha256 == hashlib.sha256(out.getvalue()).hexdigest()


def test_memory_holds_one_tensor_at_a_time() -> None:
    specs = [TensorSpec(name=f"t{i}", shape=(4,), dtype="float32") for i in range(3)]
    given_out: list[weakref.ref[np.ndarray]] = []

    def read(name: str) -> np.ndarray:
        assert all(reference() is None for reference in given_out[:-1]), "two tensors before this one are alive"
        tensor = np.zeros(4, np.float32)
        given_out.append(weakref.ref(tensor))
        return tensor

    write_tensors(io.BytesIO(), specs, read)
    assert len(given_out) == 3


def test_views_that_are_not_contiguous_are_written_in_order(path: Path) -> None:
    spec = TensorSpec(name="a", shape=(4, 3), dtype="bfloat16")
    transposed = np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4).T
    write(path, [spec], {"a": transposed})
    assert np.array_equal(map_tensors(path, [spec])["a"], transposed)


def test_a_tensor_that_is_not_its_spec_is_not_written() -> None:
    spec = TensorSpec(name="a", shape=(4,), dtype="float32")
    for tensor in (np.zeros(5, np.float32), np.zeros(4, np.float64), np.zeros((4, 1), np.float32)):
        with pytest.raises(AssertionError):
            write_tensors(io.BytesIO(), [spec], {"a": tensor}.__getitem__)
    with pytest.raises(ValueError, match="tensor a is given twice"):
        write_tensors(io.BytesIO(), [spec, spec], lambda name: np.zeros(4, np.float32))


BIG = TensorSpec(name="big", shape=(4096, 4096), dtype="float32")


@pytest.fixture(scope="module")
def big_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB, all in the page cache, so that a page is resident in the mapping as soon as it is touched."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    with path.open("wb") as file:
        write_tensors(file, [BIG], lambda name: np.ones(BIG.shape, np.float32))
    return path


def resident_kib(path: Path) -> list[int]:
    """Resident part of each mapping of a file in this process."""
    text = Path("/proc/self/smaps").read_text()
    return [int(kib) for kib in re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)]


def test_mapping_touches_no_page(big_file: Path) -> None:
    before = anonymous_kib()
    tensor = map_tensors(big_file, [BIG])["big"]
    assert resident_kib(big_file) == [0]
    assert anonymous_kib() - before < 4096
    assert tensor[2000, 2000] == 1
    assert 0 < resident_kib(big_file)[0] < 4096
    assert tensor.sum() == 4096 * 4096
    assert resident_kib(big_file)[0] >= 65536
    del tensor
    assert resident_kib(big_file) == []


def anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def test_mapped_tensors_cannot_be_written(big_file: Path) -> None:
    tensor = map_tensors(big_file, [BIG])["big"]
    with pytest.raises(ValueError, match="read-only"):
        tensor[0, 0] = 2
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        tensor.flags.writeable = True
    (permissions,) = re.findall(rf"^\S+ (\S+) .*{re.escape(str(big_file))}$", Path("/proc/self/maps").read_text(), re.M)
    assert permissions == "r--s"


def test_mapped_tensors_start_at_a_multiple_of_64(path: Path) -> None:
    specs = [TensorSpec(name=f"t{i}", shape=(i,), dtype="bfloat16") for i in range(1, 9)]
    write(path, specs, random_tensors(specs))
    assert all(tensor.ctypes.data % 64 == 0 for tensor in map_tensors(path, specs).values())


def test_a_mapping_outlives_the_replacement_of_its_file(tmp_path: Path) -> None:
    spec = TensorSpec(name="a", shape=(1024,), dtype="int32")
    write(tmp_path / "w", [spec], {"a": np.full(1024, 1, np.int32)})
    mapped = map_tensors(tmp_path / "w", [spec])["a"]
    write(tmp_path / "next", [spec], {"a": np.full(1024, 2, np.int32)})
    (tmp_path / "next").replace(tmp_path / "w")
    assert mapped.sum() == 1024
    assert map_tensors(tmp_path / "w", [spec])["a"].sum() == 2048


SPECS = [TensorSpec(name="a", shape=(16,), dtype="float32"), TensorSpec(name="b", shape=(2, 3), dtype="bfloat16")]
A = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
B = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [64, 76]}
PAD = {"dtype": "U8", "shape": [52], "data_offsets": [76, 128]}
GOOD = {"a": A, "b": B, "__pad.1": PAD}


def file_of(header: dict[str, Any] | str, data: int = 128) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    text = text.ljust((len(text) + 8 + 63) // 64 * 64 - 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def fault_of(path: Path) -> str:
    with pytest.raises(CorruptArtifactError) as caught:
        map_tensors(path, SPECS)
    error = caught.value
    assert error.expected == "the safetensors file that the manifest lists"
    assert error.action == "restore the file or rebuild the artifact"
    found = re.fullmatch(r"w\.safetensors: its header disagrees with the manifest \((.*)\)", error.found)
    assert found, error.found
    return found[1]


def test_the_hand_made_file_is_good(path: Path) -> None:
    path.write_bytes(file_of(GOOD))
    assert list(map_tensors(path, SPECS)) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "header of 0 bytes in a file of 0"),
        (b"\x38", "header of 56 bytes in a file of 1"),
        (bytes(8), "header of 0 bytes in a file of 8"),
        (bytes(200), "header of 0 bytes in a file of 200"),
        (b"\x38" + bytes(7), "header of 56 bytes in a file of 8"),
        (b"\xff" * 200, f"header of {2**64 - 1} bytes in a file of 200"),
        (file_of(GOOD)[:-1], "tensors end at 384 in a file of 383 bytes"),
        (file_of(GOOD) + b"\0", "tensors end at 384 in a file of 385 bytes"),
        (b"\xf9" + file_of(GOOD)[1:] + b"\0", "header of 249 bytes in a file of 385"),
        (b"\xb8" + file_of(GOOD)[1:], "Input data was truncated"),
        (file_of("[]"), "Expected `object`, got `array`"),
        (file_of('{"a": 1}'), "Expected `object`, got `int` - at `$[...]`"),
        (file_of({**GOOD, "__metadata__": {"format": "pt"}}), "Object contains unknown field `format` - at `$[...]`"),
        (file_of({"a": A, "__pad.1": PAD}), "'__pad.1' is at 76 to 128, after one that ends at 64"),
        (file_of({"a": A, "B": B, "__pad.1": PAD}), "no tensor b"),
        (file_of({**GOOD, "a": {**A, "dtype": "I32"}}), "a is I32 [16] in 64 bytes, not a float32[16]"),
        (file_of({**GOOD, "a": {**A, "shape": [4, 4]}}), "a is F32 [4, 4] in 64 bytes, not a float32[16]"),
        (file_of({**GOOD, "a": {**A, "data_offsets": [0, 60]}}), "'b' is at 64 to 76, after one that ends at 60"),
        (file_of({**GOOD, "b": {**B, "data_offsets": [60, 76]}}), "'b' is at 60 to 76, after one that ends at 64"),
        (file_of({**GOOD, "b": {**B, "data_offsets": [0, 64]}}), "'b' is at 0 to 64, after one that ends at 64"),
        (
            file_of({**GOOD, "b": {**B, "data_offsets": [64, 2**70]}}),
            f"'__pad.1' is at 76 to 128, after one that ends at {2**70}",
        ),
        (file_of({**GOOD, "b": {**B, "data_offsets": [-12, 0]}}), "'b' is at -12 to 0, after one that ends at 0"),
        (file_of({**GOOD, "b": {**B, "data_offsets": [76, 64]}}), "'b' is at 76 to 64, after one that ends at 64"),
        (file_of(GOOD, data=64), "tensors end at 384 in a file of 320 bytes"),
        (
            file_of({"a": A, "p": {**PAD, "data_offsets": [64, 68]}, "b": {**B, "data_offsets": [68, 80]}}, 80),
            "b starts at 68, no multiple of 64",
        ),
        (file_of('{"a": ' * 10_000), "Object contains unknown field `a` - at `$[...]`"),
        (file_of('{"a": {"shape": ' + "[" * 100_000), "Expected `int`, got `array` - at `$[...].shape[0]`"),
        (file_of('{"a": {"shape": [' + "9" * 5000), "Integer value out of range - at `$[...].shape[0]`"),
    ],
)
def test_headers_that_lie(path: Path, data: bytes, fault: str) -> None:
    path.write_bytes(data)
    assert fault_of(path) == fault


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    length = MAX_HEADER_BYTES + 56
    path.write_bytes(length.to_bytes(8, "little"))
    os.truncate(path, length + 1024)  # sparse
    assert fault_of(path) == f"header of {length} bytes in a file of {length + 1024}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_raises_anything_else(path: Path, data: st.DataObject) -> None:
    good = file_of(GOOD)
    start = data.draw(st.integers(0, 256))
    end = data.draw(st.integers(start, min(start + 20, 300)))
    damaged = good[:start] + data.draw(st.binary(max_size=20)) + good[end:]
    path.write_bytes(damaged)
    try:
        tensors = map_tensors(path, SPECS)
    except CorruptArtifactError:
        return
    # what the header says was not touched: names, shapes, dtypes and places are still those of the manifest
    assert len(damaged) == len(good)
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()] == [
        (spec.name, spec.shape, spec.numpy_dtype) for spec in SPECS
    ]


offsets = st.integers(-(2**66), 2**66) | st.integers(-130, 260)
header_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", ""]),
        "shape": st.lists(st.integers(-3, 20), max_size=3) | st.just([1] * 70),
        "data_offsets": st.tuples(offsets, offsets) | st.lists(offsets, max_size=3),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "__pad.1", "c"]), header_entries), st.integers(0, 200))
def test_no_header_raises_anything_else(path: Path, header: dict[str, Any], size: int) -> None:
    path.write_bytes(file_of({**GOOD, **header} if size % 2 else header, data=128 if size % 3 else size))
    try:
        tensors = map_tensors(path, SPECS)
    except CorruptArtifactError:
        return
    for spec in SPECS:
        assert bits(tensors[spec.name]) == (spec.shape, spec.numpy_dtype, bytes(spec.nbytes))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    make(tmp_path / "w.safetensors")
    with pytest.raises(CorruptArtifactError) as caught:
        map_tensors(tmp_path / "w.safetensors", SPECS)
    assert str(caught.value) == (
        f"w.safetensors cannot be read ({reason}); expected a weights file that this user may read; "
        "check its permissions and its disk, or restore the file"
    )
