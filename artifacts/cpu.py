"""The CPU that a program would run on: its architecture and its features.

Standard library only, and nothing here is native: a loader asks before it opens a program. Feature names are those of
Linux's /proc/cpuinfo ("flags" on x86, "Features" on ARM), for instance "avx2", "pni" (SSE3), "abm" (LZCNT), "sha_ni".
"""

import platform
from collections.abc import Iterable
from pathlib import Path

from artifacts.errors import MissingCpuFeaturesError, TargetMismatchError

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

X86_64_LEVELS: dict[str, frozenset[str]] = {"x86-64-v3": _V3, "x86-64-v4": _V4}
"""Features of each level that a build may name, beyond those of every x86-64 CPU (SSE2 and below).

A level includes those below it. Source: x86-64 psABI, "Micro-Architecture Levels". Its OSXSAVE is not in the list:
without it Linux shows no "avx".
"""


def machine_architecture() -> str:
    """Architecture of this machine, as ``uname -m`` prints it on Linux: "x86_64", "aarch64"."""
    machine = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}.get(machine, machine)


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Features that every processor of this machine has and that the system lets programs use.

    Empty where nothing can be read, which is the case on systems other than Linux: `check_cpu` then refuses a program
    that needs any feature.

    Args:
        cpuinfo: the file to read.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    processors = [frozenset(value.split()) for key, _, value in fields if key.strip() in ("flags", "Features")]
    return frozenset.intersection(*processors) if processors else frozenset()


def missing_features(required: Iterable[str], present: frozenset[str]) -> tuple[str, ...]:
    """The required features that are not present, sorted."""
    return tuple(sorted(frozenset(required) - present))


def check_cpu(architecture: str, required: Iterable[str], *, present: frozenset[str] | None = None) -> None:
    """Refuse programs that this CPU cannot run. A CPU may have more features than they need.

    Args:
        architecture: what the programs were compiled for, in the spelling of `machine_architecture`.
        required: features that the programs use.
        present: features of the CPU; those of this machine by default.

    Raises:
        TargetMismatchError: the programs are for another architecture.
        MissingCpuFeaturesError: the CPU lacks features that the programs use, or is not known to have them.
    """
    machine = machine_architecture()
    if architecture != machine:
        raise TargetMismatchError(
            found=f"CPU programs for {architecture} on a machine that is {machine}",
            expected=f"programs for {machine}",
            action=f"run the artifact on {architecture}, or rebuild it on this machine",
        )
    required = frozenset(required)
    present = cpu_features() if present is None else present
    missing = missing_features(required, present)
    if missing and not present:
        raise MissingCpuFeaturesError(
            found=f"CPU programs that use {', '.join(missing)}, on a system that does not list its CPU's features",
            expected="Linux, whose /proc/cpuinfo lists them",
            action="run the artifact on Linux",
        )
    if missing:
        raise MissingCpuFeaturesError(
            found=f"a CPU without {', '.join(missing)}, which the programs use",
            expected=f"a CPU with {', '.join(sorted(required))}",
            action=_how_to_rebuild(present),
        )


def _how_to_rebuild(present: frozenset[str]) -> str:
    """Advise the highest level that the CPU has."""
    for level in ("x86-64-v4", "x86-64-v3"):
        if X86_64_LEVELS[level] <= present:
            return f"rebuild the artifact with `--set target.isa={level}`"
    return "rebuild the artifact on this machine with `--set target.isa=native`"
