import platform
from pathlib import Path

import pytest

from artifacts.cpu import X86_64_LEVELS, check_cpu, cpu_features, machine_architecture, missing_features
from artifacts.errors import MissingCpuFeaturesError, TargetMismatchError

X86 = """\
processor\t: 0
model name\t: Some CPU with avx512f in its name
flags\t\t: fpu sse sse2 pni avx avx2 fma
bugs\t\t: spectre_v1
vmx flags\t: ept

processor\t: 1
flags\t\t: fpu sse sse2 pni avx avx2 amx_tile
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd sve i8mm
CPU implementer\t: 0x41
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("text", "features"),
    [
        (X86, {"fpu", "sse", "sse2", "pni", "avx", "avx2"}),
        (ARM, {"fp", "asimd", "sve", "i8mm"}),
        ("processor\t: 0\n", set()),
        ("", set()),
    ],
)
def test_features_are_those_of_every_processor(text: str, features: set[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert cpu_features(cpuinfo) == features


def test_no_cpuinfo_no_features(tmp_path: Path) -> None:
    assert cpu_features(tmp_path / "absent") == frozenset()


@pytest.mark.parametrize(
    ("machine", "architecture"),
    [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("aarch64", "aarch64"), ("arm64", "aarch64"), ("riscv64", "riscv64")],
)
def test_architecture_has_one_spelling(machine: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert machine_architecture() == architecture


def test_missing_features_are_sorted_and_named_once() -> None:
    assert missing_features(["fma", "avx2", "avx", "fma"], frozenset({"avx"})) == ("avx2", "fma")


@pytest.mark.parametrize("required", [[], ["avx"], ["avx2", "avx"]])
def test_a_cpu_may_have_more_than_is_needed(required: list[str]) -> None:
    check_cpu("x86_64", required, present=frozenset({"avx", "avx2", "sse4a"}))


def test_a_program_that_needs_nothing_runs_on_an_unknown_cpu() -> None:
    check_cpu("x86_64", [], present=frozenset())


@pytest.mark.parametrize(
    ("present", "required", "message"),
    [
        (
            X86_64_LEVELS["x86-64-v3"],
            ("avx512f", "avx2", "avx512vl"),
            "a CPU without avx512f, avx512vl, which the programs use; expected a CPU with avx2, avx512f, avx512vl; "
            "rebuild the artifact with `--set target.isa=x86-64-v3`",
        ),
        (
            X86_64_LEVELS["x86-64-v4"] | {"sse4a"},
            ("avx512_bf16",),
            "a CPU without avx512_bf16, which the programs use; expected a CPU with avx512_bf16; "
            "rebuild the artifact with `--set target.isa=x86-64-v4`",
        ),
        (
            X86_64_LEVELS["x86-64-v3"] - {"avx2"},
            ("avx", "avx2"),
            "a CPU without avx2, which the programs use; expected a CPU with avx, avx2; "
            "rebuild the artifact on this machine with `--set target.isa=native`",
        ),
        (
            frozenset(),
            ("avx",),
            "CPU programs that use avx, on a system that does not list its CPU's features; "
            "expected Linux, whose /proc/cpuinfo lists them; run the artifact on Linux",
        ),
    ],
)
def test_missing_features_are_refused(present: frozenset[str], required: tuple[str, ...], message: str) -> None:
    with pytest.raises(MissingCpuFeaturesError) as caught:
        check_cpu("x86_64", required, present=present)
    assert str(caught.value) == message


def test_another_architecture_is_refused() -> None:
    with pytest.raises(TargetMismatchError) as caught:
        check_cpu("aarch64", ["asimd"], present=frozenset({"asimd"}))
    assert str(caught.value) == (
        "CPU programs for aarch64 on a machine that is x86_64; expected programs for x86_64; "
        "run the artifact on aarch64, or rebuild it on this machine"
    )
    assert not isinstance(caught.value, MissingCpuFeaturesError)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_this_machine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    features = cpu_features()
    assert features >= ({"sse2"} if machine_architecture() == "x86_64" else set())
    check_cpu(machine_architecture(), features)
    with pytest.raises(MissingCpuFeaturesError) as caught:
        check_cpu(machine_architecture(), {*features, "no_such_feature"})
    assert caught.value.found == "a CPU without no_such_feature, which the programs use"
