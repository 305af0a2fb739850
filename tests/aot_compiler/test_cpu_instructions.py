import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from aot_compiler.backends.cpu_instructions import required_cpu_features
from aot_compiler.backends.isa import features_within, max_isa_flag
from artifacts import cpu
from artifacts.errors import CompileError

RET = bytes.fromhex("c3")
BF16 = bytes.fromhex("62f27e4872c0")  # vcvtneps2bf16 ymm0, zmm0: newer than capstone 5
RECORD = "+64bit,+avx,+avx512bf16,+avx512f,+bmi,+lzcnt,+sse2,+sse3,+sse4.1,+xsaves,-fma,-sha"
RECORDED = ("abm", "avx", "avx512_bf16", "avx512f", "bmi1", "pni", "sse4_1")


# --- a serialised program by hand: the fields that XLA writes, in protobuf's wire format ------------------------------


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def serialised(*objects: bytes, record: str = RECORD, triple: str = "x86_64-unknown-linux-gnu", kind: int = 2) -> bytes:
    target = field(1, triple.encode()) + field(2, b"znver4") + field(3, record.encode())
    files = b"".join(field(8, field(1, contents) + field(2, b"kernels")) for contents in objects)
    result = field(1, b"\x0a\x03abc") + field(5, kind) + files + field(9, target)
    metadata = field(2, b"pjrt_ifrt")
    return varint(len(metadata)) + metadata + field(1, result) + field(2, b"")


def object_file(*functions: bytes, gap: bytes = b"", after: bytes = b"", data: bytes = b"", machine: int = 62) -> bytes:
    """A relocatable ELF file with the functions in .ltext, a gap before each but the first, and data in .rodata."""
    text, symbols, names = b"", bytes(24), b"\0"
    for number, code in enumerate(functions):
        text += gap if text else b""
        symbols += struct.pack("<IBBHQQ", len(names), 0x12, 0, 1, len(text), len(code))  # GLOBAL FUNC in section 1
        text += code
        names += b"f%d\0" % number
    text += after
    section_names = b"\0.ltext\0.rodata\0.symtab\0.strtab\0"
    bodies = [b"", text, data, symbols, names, section_names]
    # name, type, flags (ALLOC 2, EXECINSTR 4), link, entry size
    kinds = [(0, 0, 0, 0, 0), (1, 1, 6, 0, 0), (8, 1, 2, 0, 0), (16, 2, 0, 4, 24), (24, 3, 0, 0, 0), (24, 3, 0, 0, 0)]
    offset, headers = 64, b""
    for body, (name, type_, flags, link, size) in zip(bodies, kinds, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", name, type_, flags, 0, offset, len(body), link, 1, 1, size)
        offset += len(body)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, offset, 0, 64, 0, 0, 64, len(bodies), 5)
    return header + b"".join(bodies) + headers


def features_of(code: bytes) -> set[str]:
    return set(required_cpu_features(serialised(object_file(code + RET))))


# --- one instruction: bytes and needs of each row agree with GNU as, which however lets sahf pass everywhere ---------

AVX512 = {"avx512f", "avx512vl"}
INSTRUCTIONS = [
    ("addps xmm0, xmm1", "0f58c1", set()),
    ("cmpltps xmm0, xmm1", "0fc2c101", set()),
    ("bsr eax, ecx", "0fbdc1", set()),
    ("cmovp eax, ecx", "0f4ac1", set()),
    ("lock xadd [rcx], eax", "f00fc101", set()),
    ("rep stosq", "f348ab", set()),
    ("nop word ptr cs:[rax+rax]", "662e0f1f840000000000", set()),
    ("pextrw eax, xmm1, 1", "660fc5c101", set()),
    ("pextrw [rcx], xmm0, 1", "660f3a150101", {"sse4_1"}),
    ("movddup xmm0, xmm1", "f20f12c1", {"pni"}),
    ("pshufb xmm0, xmm1", "660f3800c1", {"ssse3"}),
    ("roundps xmm0, xmm1, 1", "660f3a08c101", {"sse4_1"}),
    ("pcmpgtq xmm0, xmm1", "660f3837c1", {"sse4_2"}),
    ("crc32 eax, cl", "f20f38f0c1", {"sse4_2"}),
    ("extrq xmm1, 1, 144", "660f78c10190", {"sse4a"}),
    ("aesenc xmm0, xmm1", "660f38dcc1", {"aes"}),
    ("pclmulhqlqdq xmm0, xmm1", "660f3a44c101", {"pclmulqdq"}),
    ("gf2p8mulb xmm0, xmm1", "660f38cfc1", {"gfni"}),
    ("sha1nexte xmm0, xmm1", "0f38c8c1", {"sha_ni"}),
    ("popcnt eax, ecx", "f30fb8c1", {"popcnt"}),
    ("lzcnt eax, ecx", "f30fbdc1", {"abm"}),
    ("tzcnt eax, ecx", "f30fbcc1", {"bmi1"}),
    ("movbe eax, [rcx]", "0f38f001", {"movbe"}),
    ("adcx eax, ecx", "660f38f6c1", {"adx"}),
    ("rdrand eax", "0fc7f0", {"rdrand"}),
    ("rdseed eax", "0fc7f8", {"rdseed"}),
    ("lock cmpxchg16b [rax]", "f0480fc708", {"cx16"}),
    ("prefetchw [rax]", "0f0d08", {"3dnowprefetch"}),
    ("sahf", "9e", {"lahf_lm"}),
    ("andn eax, eax, ecx", "c4e278f2c1", {"bmi1"}),
    ("mulx eax, eax, ecx", "c4e27bf6c1", {"bmi2"}),
    ("shlx eax, ecx, eax", "c4e279f7c1", {"bmi2"}),
    ("vaddps xmm0, xmm0, xmm1", "c5f858c1", {"avx"}),
    ("vaddps ymm0, ymm0, ymm1", "c4e17c58c1", {"avx"}),
    ("vcmpltps xmm0, xmm0, xmm1", "c4e178c2c101", {"avx"}),
    ("vzeroupper", "c5f877", {"avx"}),
    ("vpaddd xmm0, xmm0, xmm1", "c4e179fec1", {"avx"}),
    ("vpaddd ymm0, ymm0, ymm1", "c5fdfec1", {"avx", "avx2"}),
    ("vpaddd ymm0, ymm0, ymm1 (three bytes)", "c4e17dfec1", {"avx", "avx2"}),
    ("vptest ymm0, ymm1", "c4e27d17c1", {"avx"}),
    ("vpermilps ymm0, ymm1, 1", "c4e37d04c101", {"avx"}),
    ("vbroadcastss xmm0, [rcx]", "c4e2791801", {"avx"}),
    ("vbroadcastss xmm0, xmm1", "c4e27918c1", {"avx", "avx2"}),
    ("vinserti128 ymm0, ymm0, xmm1, 1", "c4e37d38c101", {"avx", "avx2"}),
    ("vpsllvd xmm0, xmm0, xmm1", "c4e27947c1", {"avx", "avx2"}),
    ("vfmadd231ps ymm0, ymm0, ymm1", "c4e27db8c1", {"avx", "fma"}),
    ("vcvtph2ps xmm0, xmm1", "c4e27913c1", {"avx", "f16c"}),
    ("vaesenc xmm0, xmm0, xmm1", "c4e279dcc1", {"avx", "aes"}),
    ("vaesenc ymm0, ymm0, ymm1", "c4e27ddcc1", {"avx", "vaes"}),
    ("vgf2p8mulb xmm0, xmm0, xmm1", "c4e279cfc1", {"avx", "gfni"}),
    ("kmovw k0, k1", "c4e17890c1", {"avx512f"}),
    ("kmovb k0, k1", "c4e17990c1", {"avx512f", "avx512dq"}),
    ("kmovd k0, k1", "c4e1f990c1", {"avx512f", "avx512bw"}),
    ("kunpckbw k0, k0, k1", "c4e17d4bc1", {"avx512f"}),
    ("kaddw k0, k0, k1", "c4e17c4ac1", {"avx512f", "avx512dq"}),
    ("vaddps zmm0, zmm0, zmm1, rounding", "62f17c1858c1", {"avx512f"}),
    ("vaddss xmm0, xmm0, xmm1", "62f17e0858c1", {"avx512f"}),
    ("vmovd xmm0, ecx", "62f17d086ec1", {"avx512f"}),
    ("vfmadd231ps zmm0, zmm0, zmm1", "62f27d48b8c1", {"avx512f"}),
    ("vpaddd zmm0, zmm0, zmm1", "62f17d48fec1", {"avx512f"}),
    ("vpaddd xmm0, xmm0, xmm1 (EVEX)", "62f17d08fec1", AVX512),
    ("vbroadcastss xmm0, xmm1 (EVEX)", "62f27d0818c1", AVX512),
    ("vpternlogd xmm0, xmm0, xmm1, 1", "62f37d0825c101", AVX512),
    ("vpcmpltud k0, xmm0, xmm1", "62f37d081ec101", AVX512),
    ("vpcmpltuw k0, xmm0, xmm1", "62f3fd083ec101", AVX512 | {"avx512bw"}),
    ("vpaddb zmm0, zmm0, zmm1", "62f17d48fcc1", {"avx512f", "avx512bw"}),
    ("vpinsrb xmm0, xmm0, ecx, 1 (EVEX)", "62f37d0820c101", {"avx512f", "avx512bw"}),
    ("vandps zmm0, zmm0, zmm1", "62f17c4854c1", {"avx512f", "avx512dq"}),
    ("vpmullq ymm0, ymm0, ymm1", "62f2fd2840c1", AVX512 | {"avx512dq"}),
    ("vplzcntd zmm0, zmm1", "62f27d4844c1", {"avx512f", "avx512cd"}),
    ("vpmadd52luq zmm0, zmm0, zmm1", "62f2fd48b4c1", {"avx512f", "avx512ifma"}),
    ("vpermb zmm0, zmm0, zmm1", "62f27d488dc1", {"avx512f", "avx512vbmi"}),
    ("vpshldvd zmm0, zmm0, zmm1", "62f27d4871c1", {"avx512f", "avx512_vbmi2"}),
    ("vpdpbusd zmm0, zmm0, zmm1", "62f27d4850c1", {"avx512f", "avx512_vnni"}),
    ("vpopcntb zmm0, zmm1", "62f27d4854c1", {"avx512f", "avx512_bitalg"}),
    ("vpopcntd zmm0, zmm1", "62f27d4855c1", {"avx512f", "avx512_vpopcntdq"}),
    ("vgf2p8mulb zmm0, zmm0, zmm1", "62f27d48cfc1", {"avx512f", "gfni"}),
    ("vaesenc zmm0, zmm0, zmm1", "62f27d48dcc1", {"avx512f", "vaes"}),
]


@pytest.mark.parametrize(("code", "features"), [pytest.param(c, f, id=i) for i, c, f in INSTRUCTIONS])
def test_one_instruction(code: str, features: set[str]) -> None:
    assert features_of(bytes.fromhex(code)) == features


# --- whole programs by hand ------------------------------------------------------------------------------------------

AVX2 = bytes.fromhex("c5fdfec1") + RET
FMA = bytes.fromhex("c4e27db8c1") + RET


def test_features_of_all_functions_of_all_object_files_add_up() -> None:
    program = serialised(object_file(RET, AVX2), object_file(FMA))
    assert required_cpu_features(program) == ("avx", "avx2", "fma")


def test_a_program_without_kernels_needs_nothing() -> None:
    assert required_cpu_features(serialised()) == ()


def test_constants_outside_of_code_do_not_count() -> None:
    assert required_cpu_features(serialised(object_file(RET, data=BF16 + FMA))) == ()


@pytest.mark.parametrize("gap", [b"", bytes(5), b"\x90" * 3, b"\xcc" * 2, bytes.fromhex("662e0f1f840000000000")])
def test_filler_between_functions_is_allowed(gap: bytes) -> None:
    assert required_cpu_features(serialised(object_file(AVX2, RET, gap=gap, after=gap))) == ("avx", "avx2")


def test_code_that_no_symbol_owns_counts() -> None:
    assert required_cpu_features(serialised(object_file(RET, RET, gap=FMA))) == ("avx", "fma")
    assert required_cpu_features(serialised(object_file(RET, after=FMA))) == ("avx", "fma")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (object_file(AVX2, BF16 + RET), "function f1 holds bytes that do not decode: 62 f2 7e 48 72 c0 c3"),
        (object_file(bytes.fromhex("c5fdfe")), "function f0 holds bytes that do not decode: c5 fd fe"),
        (object_file(RET, RET, gap=BF16), "code between functions holds bytes that do not decode: 62 f2 7e 48 72 c0"),
        (object_file(bytes.fromhex("d9c0") + RET), "what `fld` (d9 c0) needs is not known"),
        (object_file(bytes.fromhex("0fae20") + RET), "what `xsave` (0f ae 20) needs is not known"),
        (object_file(RET, machine=183), "an object file is for EM_AARCH64"),
        (b"MZ\x90\0", "an object file is not ELF"),
    ],
)
def test_unreadable_code_takes_the_record(program: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert required_cpu_features(serialised(object_file(RET), program)) == RECORDED
    assert caplog.messages == [
        f"cannot tell which CPU features a program uses: {reason}; recording all 7 that its compiler was allowed"
    ]


def test_unreadable_code_without_a_record_is_refused() -> None:
    with pytest.raises(CompileError) as caught:
        required_cpu_features(serialised(object_file(BF16), record=""))
    assert str(caught.value) == (
        "a CPU program whose needs are unknown: function f0 holds bytes that do not decode: 62 f2 7e 48 72 c0, and it "
        "records no features; expected readable x86-64 code, or the record that jaxlib 0.10.2 writes; compile with the "
        "jaxlib release that pyproject.toml names"
    )


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (b"", "bytes without kernels"),
        (b"\x05abc", "bytes that do not parse"),
        (b"\0\x0a\xff", "bytes that do not parse"),
        (serialised(object_file(RET), kind=1), "bytes without kernels"),
    ],
)
def test_what_is_no_program_is_refused(program: bytes, found: str) -> None:
    with pytest.raises(CompileError) as caught:
        required_cpu_features(program)
    assert str(caught.value) == (
        f"{found} in place of a CPU program; "
        "expected what `serialize()` of an XLA:CPU executable gives in jaxlib 0.10.2; "
        "compile with the jaxlib release that pyproject.toml names"
    )


def test_another_architecture_needs_all_that_its_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    program = serialised(b"", triple="aarch64-unknown-linux-gnu", record="+neon,+sve,-sve2")
    monkeypatch.setattr(cpu, "machine_architecture", lambda: "aarch64")
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"asimd", "sve", "i8mm"}))
    assert required_cpu_features(program) == ("asimd", "i8mm", "sve")
    monkeypatch.setattr(cpu, "cpu_features", frozenset)
    assert required_cpu_features(program) == ("neon", "sve")
    monkeypatch.setattr(cpu, "machine_architecture", lambda: "x86_64")
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"avx"}))
    assert required_cpu_features(program) == ("neon", "sve")


# --- programs of XLA -------------------------------------------------------------------------------------------------

COMPILE = """
import sys
import jax, jax.numpy as jnp

def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, keep_unused=True).lower(*arguments).compile().runtime_executable().serialize()

def layer(x, w):
    h = jnp.exp(x @ w)
    return jnp.tanh(h / h.sum(-1, keepdims=True)), jnp.argmax(h, -1)

open(sys.argv[1], "wb").write(compiled(layer, (4, 64), (64, 64)))
open(sys.argv[2], "wb").write(compiled(lambda x: x, (4, 64)))
"""

on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not {"avx2", "fma"} <= cpu.cpu_features(), reason="needs an x86-64 CPU with AVX2"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Programs that XLA compiled under two limits, each in a process of its own, and one without any computation."""
    folder = tmp_path_factory.mktemp("programs")
    files: dict[str, Path] = {}
    processes = []
    for limit, flag in (("SSE4_2", "--xla_cpu_max_isa=SSE4_2"), ("x86-64-v3", max_isa_flag("x86-64-v3"))):
        files[limit], files["identity"] = folder / limit, folder / f"{limit}-identity"
        environment = os.environ | {"XLA_FLAGS": str(flag), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", COMPILE, str(files[limit]), str(files["identity"])]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait() for process in processes] == [0, 0]
    return {name: file.read_bytes() for name, file in files.items()}


@on_x86
def test_a_program_held_to_sse4_2_has_no_avx(programs: dict[str, bytes]) -> None:
    features = required_cpu_features(programs["SSE4_2"])
    assert "sse4_1" in features
    assert not [feature for feature in features if re.match("avx|fma|f16c", feature)]


@on_x86
def test_a_program_held_to_avx2_uses_it(programs: dict[str, bytes]) -> None:
    features = required_cpu_features(programs["x86-64-v3"])
    assert {"avx", "avx2", "fma"} <= set(features)
    assert features_within("x86-64-v3", features)


@on_x86
def test_programs_of_xla_are_read_without_recourse_to_the_record(
    programs: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for program in programs.values():
        assert set(required_cpu_features(program)) <= cpu.cpu_features()
    assert caplog.messages == []


@on_x86
def test_a_program_without_computation_needs_nothing(programs: dict[str, bytes]) -> None:
    assert required_cpu_features(programs["identity"]) == ()


@on_x86
def test_the_record_of_this_machine_names_features_that_linux_shows_here(programs: dict[str, bytes]) -> None:
    record = re.search(rb"\+64bit[-+a-z0-9.,]*", programs["x86-64-v3"])
    assert record is not None
    names = record[0].decode()
    features = set(required_cpu_features(serialised(object_file(BF16), record=names)))
    assert {"avx2", "fma"} <= features <= cpu.cpu_features()
