"""The comparison of a model's tensors with a checkpoint's."""

import pytest
import torch

from artifacts.errors import CheckpointTensorError
from model_defs.checkpoint import TensorInfo, match_tensors


def named(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name=name, shape=shape, dtype=torch.float32) for name, shape in shapes.items()}


def fault_of(expected, found, ignored=()) -> str:
    with pytest.raises(CheckpointTensorError) as caught:
        match_tensors(expected, found, "tiny", ignored)
    return str(caught.value)


def test_equal_tensors_match():
    match_tensors({"a": (2, 3), "b": ()}, named({"b": (), "a": (2, 3)}), "tiny")


def test_all_kinds_of_fault_in_one_error():
    expected = {"a": (2, 3), "b": (4,), "c": (5,)}
    assert fault_of(expected, named({"b": (4, 1), "c": (5,), "x": (1,)})) == (
        "tensors of tiny: 1 missing (a), 1 unexpected (x), 1 of another shape (b is [4, 1] instead of [4]); "
        "expected the 3 tensors that the configuration describes; "
        "check that weights and configuration belong to the same model"
    )


def test_at_most_eight_names_of_each():
    expected = {f"m{i}": (1,) for i in range(9)} | {f"s{i}": (1,) for i in range(10)}
    found = named({f"u{i}": (1,) for i in range(11)} | {f"s{i}": (2,) for i in range(10)})
    shapes = ", ".join(f"s{i} is [2] instead of [1]" for i in range(8))
    assert fault_of(expected, found) == (
        "tensors of tiny: 9 missing (m0, m1, m2, m3, m4, m5, m6, m7 and 1 more), "
        "11 unexpected (u0, u1, u2, u3, u4, u5, u6, u7 and 3 more), "
        f"10 of another shape ({shapes} and 2 more); expected the 19 tensors that the configuration describes; "
        "check that weights and configuration belong to the same model"
    )


def test_exactly_eight_names_are_all_listed():
    text = fault_of({f"m{i}": (1,) for i in range(8)}, {})
    assert "8 missing (m0, m1, m2, m3, m4, m5, m6, m7);" in text


def test_harmless_extras():
    found = named({"a": (1,), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,), "lm_head.weight": (2, 1)})
    match_tensors({"a": (1,)}, found, "tiny", ("lm_head.weight",))
    assert "1 unexpected (lm_head.weight)" in fault_of({"a": (1,)}, found)


def test_a_tensor_that_is_needed_is_never_ignored():
    assert "1 missing (lm_head.weight)" in fault_of({"lm_head.weight": (1,)}, {}, ("lm_head.weight",))
