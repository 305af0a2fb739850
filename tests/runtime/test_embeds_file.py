import os
import pickle
import struct
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from artifacts.errors import PromptEmbedsError
from runtime.embeds_file import read_prompt_embeds

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


def refused(path):
    with pytest.raises(PromptEmbedsError) as caught:
        read_prompt_embeds(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def rows_of(path):
    (array,) = read_prompt_embeds(path).values()
    return array


def unreadable(path, reason):
    return (
        f"{path} cannot be read: {reason}; expected an array of .npy, not pickled, or a .safetensors file with the key "
        "prompt_embeds; write it again with np.save or safetensors"
    )


def npy(header, body=b"", version=(1, 0)):
    text = header.encode() if isinstance(header, str) else header
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text + body


# What is read


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(tmp_path, dtype, order):
    np.save(tmp_path / "rows.npy", np.asarray(ROWS.astype(dtype), order=order))
    array = rows_of(tmp_path / "rows.npy")
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, ROWS)


@pytest.mark.parametrize("shape", [(12,), (1, 3, 4), (0, 4), (3, 0), ()])
def test_npy_of_other_shapes_is_left_to_the_prompt(tmp_path, shape):
    array = np.zeros(shape, np.float32)
    np.save(tmp_path / "rows.NPY.npy", array)
    assert rows_of(str(tmp_path / "rows.NPY.npy")).shape == shape


def test_npy_of_version_2_and_upper_case(tmp_path):
    path = tmp_path / "rows.NPY"
    with path.open("wb") as file:
        np.lib.format.write_array(file, ROWS, version=(2, 0))
    np.testing.assert_array_equal(rows_of(path), ROWS)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_safetensors(tmp_path, dtype):
    path = tmp_path / "rows.safetensors"
    save_file({"prompt_embeds": ROWS.astype(dtype)}, path)
    array = rows_of(path)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array.astype(np.float32), ROWS)


def test_safetensors_of_torch(tmp_path):
    save_torch_file({"prompt_embeds": torch.tensor(ROWS).bfloat16()}, tmp_path / "rows.safetensors")
    array = rows_of(tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(array.astype(np.float32), ROWS)


def test_rows_and_ids_mixed(tmp_path):
    path = tmp_path / "mixed.safetensors"
    ids, mask = np.array([7, 0, 9]), np.array([True, False, True])
    save_file({"prompt_embeds": ROWS, "prompt_token_ids": ids, "prompt_is_token_ids": mask}, path)
    read = read_prompt_embeds(path)
    assert sorted(read) == ["prompt_embeds", "prompt_is_token_ids", "prompt_token_ids"]
    np.testing.assert_array_equal(read["prompt_embeds"], ROWS)
    np.testing.assert_array_equal(read["prompt_token_ids"], ids)
    np.testing.assert_array_equal(read["prompt_is_token_ids"], mask)
    assert read["prompt_is_token_ids"].dtype == bool


# What is refused


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("prompt_embed", "did you mean prompt_embeds?"),
        ("token_ids", "did you mean prompt_token_ids?"),
        ("scale", "write the file without it"),
    ],
)
def test_a_tensor_of_another_name_is_not_dropped(tmp_path, name, action):
    path = tmp_path / "rows.safetensors"
    save_file({"prompt_embeds": ROWS, name: ROWS}, path)
    assert refused(path) == (
        f"{path} holds a tensor {name}; "
        f"expected prompt_embeds alone, or prompt_embeds, prompt_token_ids, prompt_is_token_ids; {action}"
    )


@pytest.mark.parametrize(
    ("name", "array", "found", "expected"),
    [
        ("prompt_token_ids", ROWS[0], "prompt_token_ids of F32", "prompt_token_ids of integers"),
        ("prompt_is_token_ids", np.ones(3, np.uint8), "prompt_is_token_ids of U8", "prompt_is_token_ids of bool"),
    ],
)
def test_ids_and_mask_of_other_dtypes(tmp_path, name, array, found, expected):
    path = tmp_path / "rows.safetensors"
    save_file({"prompt_embeds": ROWS, name: array}, path)
    assert refused(path) == f"{path} holds {found}; expected {expected}; convert the array and write it again"


@pytest.mark.parametrize("name", ["rows.pt", "rows.bin", "rows.pkl", "rows.npz", "rows.PT", "rows", "rows.txt"])
@pytest.mark.parametrize("there", [True, False])
def test_other_kinds(tmp_path, name, there):
    path = tmp_path / name
    if there:
        torch.save(torch.tensor(ROWS), path)
    assert refused(path) == (
        f"{path} is of kind {path.suffix or '(none)'}; "
        "expected a .npy or .safetensors file: other kinds may run code when they are read; "
        "convert it where you trust it: np.save('rows.npy', array), or "
        "safetensors.torch.save_file({'prompt_embeds': tensor}, 'rows.safetensors')"
    )


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_no_file(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    assert refused(path) == f"no file {path}; expected a .npy or .safetensors file; correct the path"
    path.mkdir()
    assert refused(path) == f"no file {path}; expected a .npy or .safetensors file; correct the path"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.npy")
    assert refused(tmp_path / "rows.npy").startswith("no file ")


class Bomb:
    def __reduce__(self):
        return (os.abort, ())


def test_pickles_are_not_run(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.array([[Bomb()]], object), allow_pickle=True)
    assert refused(path) == unreadable(path, "its array is pickled")
    path.write_bytes(pickle.dumps(Bomb()))
    assert refused(path) == unreadable(path, "it has no .npy header of version 1 or 2")
    path = tmp_path / "rows.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    assert refused(path).startswith(f"{path} cannot be read: Error while deserializing header: ")


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "U3", "longdouble", "datetime64[s]", "f4,f4"])
def test_npy_of_other_dtypes(tmp_path, dtype):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((2, 4), dtype))
    assert refused(path) == (
        f"{path} holds {np.dtype(dtype).name}; "
        "expected float16, float32 or float64, or bfloat16 in a .safetensors file; convert the array and write it again"
    )


def test_npy_knows_no_bfloat16(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, ROWS.astype(ml_dtypes.bfloat16))
    assert refused(path).startswith(
        f"{path} holds bfloat16 or raw bytes; expected float16, float32 or float64, or bfloat16"
    )


def test_safetensors_of_other_dtypes(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"prompt_embeds": np.zeros((2, 4), np.int32)}, path)
    assert refused(path).startswith(f"{path} holds I32; expected float16, ")
    save_torch_file({"prompt_embeds": torch.zeros(2, 4).to(torch.float8_e5m2)}, path)
    assert refused(path).startswith(f"{path} holds F8_E5M2; expected float16, ")


def test_safetensors_without_the_key(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"prompt_token_ids": np.zeros(3, np.int32)}, path)
    assert refused(path) == unreadable(path, "it has no tensor prompt_embeds, but prompt_token_ids")
    save_file({}, path)
    assert refused(path) == unreadable(path, "it has no tensor prompt_embeds, but none at all")


HEADER = "{{'descr': '<f4', 'fortran_order': False, 'shape': {}, }}"


@pytest.mark.parametrize(
    ("shape", "body", "reason"),
    [
        ("(3, 4)", 47, "float32[3, 4] does not fit the 47 bytes after the header"),
        ("(3, 4)", 49, "float32[3, 4] does not fit the 49 bytes after the header"),
        ("(3, 4)", 0, "float32[3, 4] does not fit the 0 bytes after the header"),
        ("(1099511627776, 4)", 16, "float32[1099511627776, 4] does not fit the 16 bytes after the header"),
        ("(4294967296, 4294967296)", 0, "float32[4294967296, 4294967296] does not fit the 0 bytes after the header"),
        ("(-1, -4)", 16, "float32[-1, -4] does not fit the 16 bytes after the header"),
        (f"(0, {10**30})", 0, f"float32[0, {10**30}] does not fit the 0 bytes after the header"),
        (f"({'1, ' * 70})", 4, f"float32[{', '.join('1' * 70)}] does not fit the 4 bytes after the header"),
        ("(3, 4.0)", 48, "it has no .npy header of version 1 or 2"),
        ("3", 12, "it has no .npy header of version 1 or 2"),
        ("__import__('os').abort()", 12, "it has no .npy header of version 1 or 2"),
        ("(" * 3000, 12, "it has no .npy header of version 1 or 2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_npy_headers_that_lie(tmp_path, shape, body, reason):
    path = tmp_path / "rows.npy"
    path.write_bytes(npy(HEADER.format(shape), bytes(body)))
    tracemalloc.start()
    assert refused(path) == unreadable(path, reason)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20  # nothing was allocated for what it declares


def test_safetensors_headers_that_lie(tmp_path):
    path = tmp_path / "rows.safetensors"
    for header in (
        b'{"prompt_embeds":{"dtype":"F32","shape":[1048576,1048576],"data_offsets":[0,16]}}',
        b'{"prompt_embeds":{"dtype":"F32","shape":[4],"data_offsets":[0,1099511627776]}}',
        b'{"prompt_embeds":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        assert refused(path).startswith(f"{path} cannot be read: Error while deserializing header: ")


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("content", ["empty", "one byte", "text", "zip", "torch"])
def test_other_content(tmp_path, suffix, content):
    path = tmp_path / f"rows{suffix}"
    if content == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("rows.npy", "x" * 100)
    elif content == "torch":
        torch.save(torch.tensor(ROWS), path)
    else:
        path.write_bytes({"empty": b"", "one byte": b"\x93", "text": b"0.5 0.25\n" * 30}[content])
    assert refused(path).startswith(f"{path} cannot be read: ")


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_every_truncation(tmp_path, suffix):
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(whole, ROWS)
    else:
        save_file({"prompt_embeds": ROWS}, whole)
    data = whole.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert refused(path).startswith(f"{path} cannot be read: ")
    path.write_bytes(data + b"x")
    assert refused(path).startswith(f"{path} cannot be read: ")


def test_many_at_once(tmp_path):
    """A check that changes state of the process would let some of the wrong ones through."""
    paths = []
    for i in range(64):
        paths.append(tmp_path / f"{i}{'.npy' if i % 2 else '.safetensors'}")
        paths[-1].write_bytes(valid(paths[-1].suffix) + bytes(i % 4 > 1))

    def accepted(path):
        try:
            return rows_of(path).shape == (3, 4)
        except PromptEmbedsError:
            return False

    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            assert list(pool.map(accepted, paths)) == [i % 4 < 2 for i in range(64)]


def valid(suffix):
    if suffix == ".npy":
        return npy(HEADER.format("(3, 4)"), ROWS.tobytes())
    header = b'{"prompt_embeds":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    return len(header).to_bytes(8, "little") + header + ROWS.tobytes()


@pytest.mark.filterwarnings("ignore")  # of Python's parser, about headers that are junk
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffix=st.sampled_from([".npy", ".safetensors"]), data=st.data())
def test_any_bytes_are_read_or_refused(tmp_path, suffix, data):
    content = bytearray(valid(suffix))
    if data.draw(st.booleans()):
        for at, byte in data.draw(
            st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)
        ):
            content[at] = byte
    else:
        content[data.draw(st.integers(0, 16)) :] = data.draw(st.binary(max_size=200))
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    try:
        array = rows_of(path)
    except PromptEmbedsError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert array.dtype.name in ("float16", "bfloat16", "float32", "float64")
        assert array.nbytes <= len(content)
