from typing import get_args

import pytest

from aot_compiler.backends.isa import features_beyond, features_within, max_isa_flag, permitted_features
from aot_compiler.config import Isa


def test_flag_for_xla_of_every_level_that_a_configuration_may_name() -> None:
    assert {isa: max_isa_flag(isa) for isa in get_args(Isa)} == {
        "native": None,
        "x86-64-v3": "--xla_cpu_max_isa=AVX2",
        "x86-64-v4": "--xla_cpu_max_isa=AVX512",
    }


def test_each_level_contains_the_one_below() -> None:
    v3, v4 = permitted_features("x86-64-v3"), permitted_features("x86-64-v4")
    assert v3 is not None
    assert v4 is not None
    assert v3 < v4


@pytest.mark.parametrize(
    ("isa", "features", "beyond"),
    [
        ("x86-64-v3", ("pni", "sse4_1", "sse4_2", "ssse3", "popcnt", "cx16", "lahf_lm"), ()),
        ("x86-64-v3", ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "sse4_2"), ()),
        ("x86-64-v3", ("avx2", "sse4a", "avx512f", "gfni"), ("avx512f", "gfni", "sse4a")),
        ("x86-64-v4", ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "fma"), ()),
        ("x86-64-v4", ("avx512f", "avx512vbmi", "avx512_vnni"), ("avx512_vnni", "avx512vbmi")),
        ("native", ("avx512_bf16", "amx_tile"), ()),
    ],
)
def test_features_beyond_a_level(isa: str, features: tuple[str, ...], beyond: tuple[str, ...]) -> None:
    assert features_beyond(isa, features) == beyond
    assert features_within(isa, features) == (not beyond)
