"""Levels of the x86-64 instruction set that a CPU program may be held to, and what XLA makes of them.

XLA:CPU takes its limit from ``XLA_FLAGS=--xla_cpu_max_isa=VALUE`` when a process first asks for a device; the compile
option of the same name is accepted and ignored. It limits vector extensions and nothing else, and never adds what the
build machine lacks. What was measured with jaxlib 0.10.2:

- AVX2 takes away AVX-512 and keeps the rest of the build machine, for instance sse4a on AMD and gfni on Intel.
- AVX512 takes away VNNI and BF16 only: VBMI, IFMA and others of a newer machine remain.

x86-64-v2 is not offered: SSE4_2 leaves BMI in programs (``andn`` in a gather), and jaxlib itself demands AVX.

Hence a level is a promise to check, by `features_within` on what the finished program uses, and not one that XLA keeps.
"""

from collections.abc import Iterable

from artifacts.cpu import X86_64_LEVELS, missing_features

_MAX_ISA = {"native": None, "x86-64-v3": "AVX2", "x86-64-v4": "AVX512"}


def max_isa_flag(isa: str) -> str | None:
    """The flag that has to be in ``XLA_FLAGS`` before a process starts jax; None for "native", which has no limit.

    Args:
        isa: "native" or a level of the x86-64 psABI, as in the configuration.
    """
    limit = _MAX_ISA[isa]
    return f"--xla_cpu_max_isa={limit}" if limit else None


def permitted_features(isa: str) -> frozenset[str] | None:
    """Features that programs may use, beyond those of every x86-64 CPU; None for "native": all."""
    return None if isa == "native" else X86_64_LEVELS[isa]


def features_beyond(isa: str, features: Iterable[str]) -> tuple[str, ...]:
    """Those of the features that a level does not permit, sorted."""
    permitted = permitted_features(isa)
    return () if permitted is None else missing_features(features, permitted)


def features_within(isa: str, features: Iterable[str]) -> bool:
    """Whether a level permits all the features."""
    return not features_beyond(isa, features)
