import resource
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from artifacts.errors import PromptEmbedsError, PromptError
from runtime.prompts import parse_prompt

H, LONGEST = 4, 10
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def parse(prompt, *, dtype=FLOAT32):
    return parse_prompt(prompt, hidden_size=H, vocab_size=50, dtype=dtype, tokenizer=None, max_length=LONGEST)


def rows(count, dtype=np.float32):
    return (np.arange(count * H).reshape(count, H) / 8 - 1).astype(dtype)


def refused(kind, prompt, **options):
    with pytest.raises(kind) as caught:
        parse(prompt, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def float_arrays():
    """The same rows in every kind of array, exact in each dtype."""
    values = rows(3)
    strided = np.zeros((6, 2 * H), np.float32)
    strided[::2, ::2] = values
    return {
        "numpy float16": values.astype(np.float16),
        "numpy bfloat16": values.astype(ml_dtypes.bfloat16),
        "numpy float32": values,
        "numpy float64": values.astype(np.float64),
        "numpy big-endian": values.astype(">f4"),
        "numpy [1, n, H]": values[None],
        "numpy Fortran": np.asfortranarray(values),
        "numpy strided": strided[::2, ::2],
        "numpy reversed": values[::-1].copy()[::-1],
        "torch float16": torch.tensor(values).half(),
        "torch bfloat16": torch.tensor(values).bfloat16(),
        "torch float32": torch.tensor(values),
        "torch float64": torch.tensor(values).double(),
        "torch [1, n, H]": torch.tensor(values)[None],
        "torch transposed": torch.tensor(values.T.copy()).T,
        "torch bfloat16 transposed": torch.tensor(values.T.copy()).bfloat16().T,
        "torch negated view": torch.complex(torch.zeros(3, H), torch.tensor(-values)).conj().imag,
        "torch requires grad": torch.tensor(values, requires_grad=True),
        "torch bfloat16 requires grad": torch.tensor(values).bfloat16().requires_grad_(),
        "torch output with a graph": torch.tensor(values, requires_grad=True) * 1,
        "torch parameter": torch.nn.Parameter(torch.tensor(values)),
        "jax float32": jnp.asarray(values),
        "jax bfloat16": jnp.asarray(values, jnp.bfloat16),
        "jax [1, n, H]": jnp.asarray(values)[None],
        "DLPack alone": DLPackOnly(values),
        "__array__ alone": ArrayOnly(values),
    }


class DLPackOnly:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ArrayOnly:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("kind", float_arrays())
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_every_kind_of_float_array(kind, dtype):
    array = float_arrays()[kind]
    prompt = parse({"prompt_embeds": array}, dtype=dtype)
    assert prompt.embeds.dtype == dtype
    np.testing.assert_array_equal(prompt.embeds.astype(np.float32), rows(3))
    assert prompt.token_ids.tolist() == [0, 0, 0]
    assert prompt.is_token_ids.tolist() == [False, False, False]
    assert prompt.reported_ids == [None, None, None]
    assert prompt.text is None


def test_rounding_is_to_nearest():
    values = np.random.default_rng(0).normal(size=(3, H))
    np.testing.assert_array_equal(parse({"prompt_embeds": values}).embeds, values.astype(np.float32))
    expected = torch.tensor(values, dtype=torch.float32).bfloat16().float().numpy()
    cast = parse({"prompt_embeds": values.astype(np.float32)}, dtype=BFLOAT16).embeds.astype(np.float32)
    np.testing.assert_array_equal(cast, expected)


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_a_change_after_submission_changes_nothing(make):
    memory, ids, mask = rows(3), np.array([7, 8, 9]), np.array([True, False, False])
    prompt = parse({"prompt_token_ids": ids, "prompt_embeds": make(memory), "prompt_is_token_ids": mask})
    memory[:], ids[:], mask[:] = 9, 1, True
    np.testing.assert_array_equal(prompt.embeds[1:], rows(3)[1:])
    assert (prompt.token_ids.tolist(), prompt.is_token_ids.tolist()) == ([7, 0, 0], [True, False, False])


def test_arrays_are_read_only():
    mixed = parse({"prompt_token_ids": [1, 2], "prompt_embeds": rows(2), "prompt_is_token_ids": [True, False]})
    for array in (mixed.token_ids, mixed.is_token_ids, mixed.embeds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


SHAPE = "expected [n, 4] or [1, n, 4]; pass one row of 4 values, the hidden size, for each prompt token"


@pytest.mark.parametrize(
    "shape",
    [(3, H - 1), (3, H + 1), (3, 2 * H), (H,), (), (2, 3, H), (0, 3, H), (1, 1, 3, H), (3, 0), (H, 3), (1, 3, H - 1)],
    ids=str,
)
@pytest.mark.parametrize("make", [np.zeros, torch.zeros, jnp.zeros], ids=["numpy", "torch", "jax"])
def test_wrong_shapes(shape, make):
    text = refused(PromptEmbedsError, {"prompt_embeds": make(shape)})
    assert text == f"prompt_embeds of shape {list(shape)}; {SHAPE}"


@pytest.mark.parametrize("shape", [(0, H), (1, 0, H)])
def test_no_rows(shape):
    assert refused(PromptError, {"prompt_embeds": np.zeros(shape, np.float32)}) == (
        "an empty prompt; expected one token or more; pass text, token ids or embeddings"
    )


DTYPES = (
    "expected one of float16, bfloat16, float32, float64; "
    "pass the rows that the model's embedding gives, in one of these"
)


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int32",
        "int64",
        "bool",
        "complex64",
        "object",
        "str96",
        "longdouble",
        "datetime64",
        "float8_e5m2",
    ],
)
def test_wrong_dtypes(dtype):
    array = np.zeros((2, H), "U3" if dtype == "str96" else dtype)
    text = refused(PromptEmbedsError, {"prompt_embeds": array})
    assert text == f"prompt_embeds of dtype {array.dtype.name}; {DTYPES}"


KIND = "expected a dense float array in host memory, [n, 4] or [1, n, 4]; " \
    "convert it first, as with .to_dense(), .dequantize(), .cpu() or np.asarray(rows, np.float32)"  # fmt: skip


def other_arrays():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about beta layouts and deprecated quantization
        dense = torch.ones(2, H)
        return {
            "a torch tensor of layout torch.sparse_coo": dense.to_sparse(),
            "a torch tensor of layout torch.sparse_csr": dense.to_sparse_csr(),
            "a torch tensor of layout nested": torch.nested.nested_tensor([dense, dense]),
            "a torch tensor on device meta": torch.empty(2, H, device="meta"),
            "a quantized torch tensor": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "a masked array": np.ma.masked_equal(np.ones((2, H), np.float32), 1),
            "of type list": rows(2).tolist(),
            "of type NoneType": None,
            "of type str": "rows.npy",
            "a Tensor that numpy cannot read (Got unsupported ScalarType Float8_e4m3fn)": dense.to(torch.float8_e4m3fn),
        }


@pytest.mark.parametrize("kind", other_arrays())
def test_arrays_that_are_not_dense_on_the_host(kind):
    assert refused(PromptEmbedsError, {"prompt_embeds": other_arrays()[kind]}) == f"prompt_embeds is {kind}; {KIND}"


class OnAccelerator(ArrayOnly):
    """What an array of a GPU library shows: reading it here would fetch it."""

    shape = (2, H)

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("fetched")

    def __dlpack_device__(self):
        return (2, 0)


def test_arrays_on_a_device_are_not_fetched():
    text = refused(PromptEmbedsError, {"prompt_embeds": OnAccelerator(rows(2))})
    assert text == f"prompt_embeds is a OnAccelerator in the memory of a device (DLPack type 2); {KIND}"


def test_foreign_code_that_raises():
    deleted = jnp.ones((2, H))
    deleted.delete()
    text = refused(PromptEmbedsError, {"prompt_embeds": deleted})
    assert text.startswith("prompt_embeds is a ArrayImpl that numpy cannot read (Array has been deleted")

    def traced(x):
        with pytest.raises(PromptEmbedsError, match="that numpy cannot read"):
            parse({"prompt_embeds": x})
        return x

    jax.eval_shape(traced, jnp.ones((2, H)))


def test_what_is_refused_is_not_read():
    """Neither made dense nor copied, whatever the declared shape: each of these would need 2 GiB or far more."""
    huge = 2**30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outside = torch.sparse_coo_tensor([[5 * huge], [0]], [1.0], (huge, H), check_invariants=False)
        square = torch.sparse_coo_tensor([[0], [0]], [1.0], (huge, huge))
    broadcast = np.broadcast_to(np.float32(1), (huge, H))
    integers = np.broadcast_to(np.int8(1), (LONGEST - 1, H))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    refused(PromptError, {"prompt_embeds": outside})
    refused(PromptEmbedsError, {"prompt_embeds": square})
    refused(PromptError, {"prompt_embeds": broadcast})
    refused(PromptEmbedsError, {"prompt_embeds": integers})
    refused(PromptError, np.broadcast_to(np.int32(1), (huge,)))
    refused(PromptError, range(huge))
    peak = tracemalloc.get_traced_memory()[1]  # numpy tells of its arrays
    tracemalloc.stop()
    assert peak < 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024  # KiB


LARGEST = {FLOAT32: "3.4028235e+38", BFLOAT16: "3.3895314e+38"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
def test_values_that_are_not_finite(value, dtype, source):
    array = rows(5, source)
    array[3, 2] = value
    array[4, 0] = value
    assert refused(PromptEmbedsError, {"prompt_embeds": array}, dtype=dtype) == (
        f"prompt_embeds holds {value} at row 3, column 2; expected finite values of magnitude up to {LARGEST[dtype]}, "
        f"the largest of {dtype}; look for an overflow where the row was made"
    )


@pytest.mark.parametrize(
    ("value", "source", "dtype"),
    [(3.4e38, "float32", BFLOAT16), (-1e39, "float64", FLOAT32), (1e300, "float64", BFLOAT16)],
)
def test_values_that_overflow_in_the_cast(value, source, dtype):
    array = rows(2, source)
    array[1, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = refused(PromptEmbedsError, {"prompt_embeds": array}, dtype=dtype)
    assert text.startswith(f"prompt_embeds holds {array[1, 0]:.8g} at row 1, column 0; expected finite values")
    array[1, 0] = np.sign(value) * float(LARGEST[dtype]) * 0.999
    assert np.isfinite(parse({"prompt_embeds": array}, dtype=dtype).embeds.astype(np.float32)).all()
