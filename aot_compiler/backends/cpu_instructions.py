"""Which CPU features the machine code of a serialised XLA:CPU program uses.

XLA writes the whole feature list of the build machine into a program, used or not, and on another machine only logs
what is lacking there. This module reads the instructions instead, so that a program is refused exactly where it would
crash.

What ``serialize()`` of an executable gives in jaxlib 0.10.2 (field numbers of XLA's ``executable.proto``)::

    length, IFRT metadata                     devices and layouts
    1 CompilationResultProto
        8 object_files, one for each kernel   1 contents: relocatable ELF
        9 target_machine_options              1 triple, 2 cpu, 3 features: LLVM's names, "+avx2,...,-avx512f"
    2 CompileOptionsProto

Code lies in the executable sections, in functions whose size the symbol table gives; constants lie in other sections.
capstone finds the instructions and names them. Its instruction groups are of no use here (release 5 puts FMA and most
of AVX-512 in none, and some of AVX in AVX-512), so the tables below go from name and encoding to feature. A name in no
table is unreadable, like bytes that do not decode: then the program is taken to need all that its compiler was allowed.

Feature names are those of the "flags" line of Linux's /proc/cpuinfo. What every x86-64 CPU has (SSE2 and below) is left
out.
"""

import io
import logging
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import capstone
from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto, text_format
from google.protobuf.message import DecodeError

from artifacts import cpu
from artifacts.errors import CompileError

logger = logging.getLogger(__name__)


def required_cpu_features(program: bytes) -> tuple[str, ...]:
    """The CPU features that a program's machine code uses. To be asked on the machine that compiled the program.

    Where x86-64 code cannot be read, the answer is every feature of the build machine that XLA could have used, as the
    program records them, and a warning says why. Only features that Linux publishes can be named: AVX-IFMA,
    AVX-NE-CONVERT and AVX-VNNI-INT8 are in no cpuinfo.

    Code of other architectures is not read. There the record is not whole either (LLVM derives features from the CPU's
    name too), so the answer is all that this machine publishes, or the record in LLVM's names where it publishes none.

    Args:
        program: a serialised XLA:CPU executable.

    Returns:
        Names of /proc/cpuinfo, sorted, each once; empty where any x86-64 CPU will do.

    Raises:
        CompileError: the bytes are not such an executable, or neither its code nor its record can be read.
    """
    result = _parse(program)
    target = result.target_machine_options
    architecture = target.triple.partition("-")[0]
    recorded = {name[1:] for name in target.features.split(",") if name.startswith("+")}
    if architecture != "x86_64":
        is_here = architecture == cpu.machine_architecture()
        return tuple(sorted((cpu.cpu_features() if is_here else frozenset()) or recorded))
    try:
        return tuple(sorted({feature for file in result.object_files for feature in _object_features(file.contents)}))
    except UnreadableCodeError as unreadable:
        features = {_RECORDED[name] for name in recorded & _RECORDED.keys()}
        if not features:
            raise CompileError(
                found=f"a CPU program whose needs are unknown: {unreadable}, and it records no features",
                expected="readable x86-64 code, or the record that jaxlib 0.10.2 writes",
                action="compile with the jaxlib release that pyproject.toml names",
            ) from unreadable
        logger.warning(
            "cannot tell which CPU features a program uses: %s; recording all %d that its compiler was allowed",
            unreadable,
            len(features),
        )
        return tuple(sorted(features))


class UnreadableCodeError(Exception):
    """Code whose needs cannot be told."""


def _message_classes() -> dict[str, Any]:
    """Message classes of the fields that are read; all others are skipped."""
    schema = """
        name: "aot/xla_cpu_program.proto" package: "aot.xla_cpu" syntax: "proto3"
        message_type { name: "IfrtMetadata" }
        message_type { name: "ObjectFile" field { name: "contents" number: 1 type: TYPE_BYTES } }
        message_type {
          name: "TargetMachineOptions"
          field { name: "triple" number: 1 type: TYPE_STRING } field { name: "features" number: 3 type: TYPE_STRING }
        }
        message_type {
          name: "CompilationResult"
          field { name: "obj_files_kind" number: 5 type: TYPE_INT32 }
          field { name: "object_files" number: 8 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "ObjectFile" }
          field { name: "target_machine_options" number: 9 type: TYPE_MESSAGE type_name: "TargetMachineOptions" }
        }
        message_type {
          name: "Program"
          field { name: "result" number: 1 type: TYPE_MESSAGE type_name: "CompilationResult" }
        }
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(schema, descriptor_pb2.FileDescriptorProto()))
    names = ("IfrtMetadata", "Program")
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"aot.xla_cpu.{name}")) for name in names}


_MESSAGES = _message_classes()
_OBJECT_FILES_OF_KERNELS = 2  # CompilationResultProto.ObjFileKind


def _parse(program: bytes) -> Any:
    """The CompilationResultProto inside a serialised executable."""
    stream = io.BytesIO(program)
    try:
        proto.parse_length_prefixed(_MESSAGES["IfrtMetadata"], stream)
        result = _MESSAGES["Program"].FromString(stream.read()).result
    except (DecodeError, ValueError) as error:
        raise _not_a_program("bytes that do not parse") from error
    if result.obj_files_kind != _OBJECT_FILES_OF_KERNELS:
        raise _not_a_program("bytes without kernels")
    return result


def _not_a_program(what: str) -> CompileError:
    return CompileError(
        found=f"{what} in place of a CPU program",
        expected="what `serialize()` of an XLA:CPU executable gives in jaxlib 0.10.2",
        action="compile with the jaxlib release that pyproject.toml names",
    )


# --- from an object file to its instructions -------------------------------------------------------------------------


def _object_features(contents: bytes) -> Iterator[str]:
    """Features of all the code of one object file, with repeats."""
    disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    for name, code in _functions(contents):
        for mnemonic, encoding in _instructions(disassembler, name, code):
            yield from instruction_features(mnemonic, encoding)


def _functions(contents: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and code of every function of an object file, and what stands between them, which should be filler."""
    try:
        elf = ELFFile(io.BytesIO(contents))
        if elf["e_machine"] != "EM_X86_64":
            raise UnreadableCodeError(f"an object file is for {elf['e_machine']}")
        sections = list(elf.iter_sections())
        code = {i: s.data() for i, s in enumerate(sections) if s["sh_flags"] & SH_FLAGS.SHF_EXECINSTR}
        symbols = [symbol for s in sections if isinstance(s, SymbolTableSection) for symbol in s.iter_symbols()]
        functions = sorted(
            (symbol["st_shndx"], symbol["st_value"], symbol["st_size"], symbol.name)
            for symbol in symbols
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] in code
        )
    except ELFError as error:
        raise UnreadableCodeError("an object file is not ELF") from error
    read = dict.fromkeys(code, 0)
    for index, start, size, name in functions:
        yield "code between functions", code[index][read[index] : start]
        yield f"function {name}", code[index][start : start + size]
        read[index] = max(read[index], start + size)
    for index, end in read.items():
        yield "code after functions", code[index][end:]


def _instructions(disassembler: capstone.Cs, name: str, code: bytes) -> Iterator[tuple[str, bytes]]:
    """Mnemonic and bytes of every instruction of a function; zeros alone are none."""
    end = 0 if any(code) else len(code)
    for address, size, mnemonic, _ in disassembler.disasm_lite(code[end:], 0):
        end = address + size
        yield mnemonic, code[address:end]
    if end != len(code):
        raise UnreadableCodeError(f"{name} holds bytes that do not decode: {code[end : end + 8].hex(' ')}")


# --- which name belongs to which feature -----------------------------------------------------------------------------

_CONDITIONS = ("a", "ae", "b", "be", "e", "g", "ge", "l", "le", "ne", "no", "np", "ns", "o", "p", "s")

_LEGACY_NAMES = {
    # Integer, SSE and SSE2: every x86-64 CPU has them. x87, MMX and system instructions are left out: XLA emits none.
    "": """
    adc add and bsf bsr bswap bt btc btr bts call cbw cdq cdqe clc cld cmc cmp cmpsb cmpsd cmpsq cmpsw cmpxchg cmpxchg8b
    cqo cwd cwde dec div endbr64 idiv imul inc int3 jecxz jmp jrcxz lea leave lfence lodsb lodsd lodsq lodsw mfence mov
    movabs movnti movsb movsd movsq movsw movsx movsxd movzx mul neg nop not or pause pop popf popfq prefetchnta
    prefetcht0 prefetcht1 prefetcht2 push pushf pushfq rcl rcr ret rol ror sar sbb scasb scasd scasq scasw sfence shl
    shld shr shrd stc std stosb stosd stosq stosw sub test ud2 xadd xchg xor

    addpd addps addsd addss andnpd andnps andpd andps clflush cmppd cmpps cmpsd cmpss comisd comiss cvtdq2pd cvtdq2ps
    cvtpd2dq cvtpd2ps cvtps2dq cvtps2pd cvtsd2si cvtsd2ss cvtsi2sd cvtsi2ss cvtss2sd cvtss2si cvttpd2dq cvttps2dq
    cvttsd2si cvttss2si divpd divps divsd divss ldmxcsr maskmovdqu maxpd maxps maxsd maxss minpd minps minsd minss
    movapd movaps movd movdqa movdqu movhlps movhpd movhps movlhps movlpd movlps movmskpd movmskps movntdq movntpd
    movntps movq movss movupd movups mulpd mulps mulsd mulss orpd orps packssdw packsswb packuswb paddb paddd paddq
    paddsb paddsw paddusb paddusw paddw pand pandn pavgb pavgw pcmpeqb pcmpeqd pcmpeqw pcmpgtb pcmpgtd pcmpgtw pextrw
    pinsrw pmaddwd pmaxsw pmaxub pminsw pminub pmovmskb pmulhuw pmulhw pmullw pmuludq por psadbw pshufd pshufhw pshuflw
    pslld pslldq psllq psllw psrad psraw psrld psrldq psrlq psrlw psubb psubd psubq psubsb psubsw psubusb psubusw psubw
    punpckhbw punpckhdq punpckhqdq punpckhwd punpcklbw punpckldq punpcklqdq punpcklwd pxor rcpps rcpss rsqrtps rsqrtss
    shufpd shufps sqrtpd sqrtps sqrtsd sqrtss stmxcsr subpd subps subsd subss ucomisd ucomiss unpckhpd unpckhps unpcklpd
    unpcklps xorpd xorps
    """,
    "pni": "addsubpd addsubps haddpd haddps hsubpd hsubps lddqu movddup movshdup movsldup",
    "ssse3": """
    pabsb pabsd pabsw palignr phaddd phaddsw phaddw phsubd phsubsw phsubw pmaddubsw pmulhrsw pshufb psignb psignd psignw
    """,
    "sse4_1": """
    blendpd blendps blendvpd blendvps dppd dpps extractps insertps movntdqa mpsadbw packusdw pblendvb pblendw pcmpeqq
    pextrb pextrd pextrq phminposuw pinsrb pinsrd pinsrq pmaxsb pmaxsd pmaxud pmaxuw pminsb pminsd pminud pminuw
    pmovsxbd pmovsxbq pmovsxbw pmovsxdq pmovsxwd pmovsxwq pmovzxbd pmovzxbq pmovzxbw pmovzxdq pmovzxwd pmovzxwq pmuldq
    pmulld ptest roundpd roundps roundsd roundss
    """,
    "sse4_2": "crc32 pcmpestri pcmpestrm pcmpgtq pcmpistri pcmpistrm",
    "sse4a": "extrq insertq movntsd movntss",
    "aes": "aesdec aesdeclast aesenc aesenclast aesimc aeskeygenassist",
    "pclmulqdq": "pclmulqdq pclmulhqhqdq pclmulhqlqdq pclmullqhqdq pclmullqlqdq",
    "gfni": "gf2p8affineinvqb gf2p8affineqb gf2p8mulb",
    "sha_ni": "sha1msg1 sha1msg2 sha1nexte sha1rnds4 sha256msg1 sha256msg2 sha256rnds2",
    "lahf_lm": "lahf sahf",
    "cx16": "cmpxchg16b",
    "popcnt": "popcnt",
    "abm": "lzcnt",
    "bmi1": "tzcnt",
    "movbe": "movbe",
    "adx": "adcx adox",
    "rdrand": "rdrand",
    "rdseed": "rdseed",
    "3dnowprefetch": "prefetchw",
}
_LEGACY: dict[str, frozenset[str]] = {
    name: frozenset({feature} - {""}) for feature, names in _LEGACY_NAMES.items() for name in names.split()
} | {stem + condition: frozenset() for stem in ("j", "set", "cmov") for condition in _CONDITIONS}

# Features that stay needed in VEX form, and what the 256-bit form needs.
_WIDE = {"aes": "vaes", "pclmulqdq": "vpclmulqdq", "gfni": "gfni"}

_VEX_ONLY_NAMES = {
    "avx": """
    vbroadcastf128 vextractf128 vinsertf128 vmaskmovpd vmaskmovps vperm2f128 vpermilpd vpermilps vtestpd vtestps
    vzeroall vzeroupper
    """,
    "avx avx2": """
    vbroadcasti128 vextracti128 vgatherdpd vgatherdps vgatherqpd vgatherqps vinserti128 vpblendd vpbroadcastb
    vpbroadcastd vpbroadcastq vpbroadcastw vperm2i128 vpermd vpermpd vpermps vpermq vpgatherdd vpgatherdq vpgatherqd
    vpgatherqq vpmaskmovd vpmaskmovq vpsllvd vpsllvq vpsravd vpsrlvd vpsrlvq
    """,
    "avx f16c": "vcvtph2ps vcvtps2ph",
    "bmi1": "andn bextr blsi blsmsk blsr",
    "bmi2": "bzhi mulx pdep pext rorx sarx shlx shrx",
}
_VEX_ONLY = {name: frozenset(features.split()) for features, names in _VEX_ONLY_NAMES.items() for name in names.split()}
_FMA = re.compile(r"vfn?m(add|sub|addsub|subadd)(132|213|231)[ps][sd]")
_MASK_REGISTERS = re.compile(r"k(addn?|andn?|mov|not|or|ortest|shift[lr]|test|unpck[bwd]|xnor|xor)([bwdq])")

# LLVM's names of the features whose instructions a compiler can select, in Linux's spelling. What is absent is had by
# every x86-64 CPU, or concerns systems and not programs, or is not published by Linux.
_RECORDED = {
    **{name: name for name in ("adx", "aes", "avx", "avx2", "bmi2", "cx16", "f16c", "fma", "fma4", "gfni", "movbe")},
    **{name: name for name in ("popcnt", "rdseed", "sse4a", "ssse3", "tbm", "vaes", "vpclmulqdq", "xop")},
    **{f"avx512{suffix}": f"avx512{suffix}" for suffix in ("bw", "cd", "dq", "f", "ifma", "vbmi", "vl")},
    **{f"avx512{suffix}": f"avx512_{suffix}" for suffix in ("bf16", "bitalg", "fp16", "vbmi2", "vnni")},
    **{f"avx512{suffix}": f"avx512_{suffix}" for suffix in ("vp2intersect", "vpopcntdq")},
    **{f"amx-{suffix}": f"amx_{suffix}" for suffix in ("bf16", "int8", "tile")},
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "rdrnd": "rdrand",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
}

# Each needs AVX512F beside its own feature. EVEX forms of VEX instructions that are in no row need AVX512F alone.
_AVX512_NAMES = {
    "avx512f": r"""
    valign[dq] | vp?blendm(p[sd]|[dq]) | v(broadcast|extract|insert)[fi](32x4|64x4) | vbroadcasts[sd]
    | vp?(compress|expand)(p[sd]|[dq])
    | vcvtt?p[sd]2udq | vcvtt?s[sd]2usi | vcvtudq2p[sd] | vcvtusi2s[sd]
    | v(fixupimm|getexp|getmant|rcp14|rndscale|rsqrt14|scalef)[ps][sd] | vmovdq[au](32|64) | vpabsq | vp(andn?|x?or)[dq]
    | vpcmp(eq|gt|n?l[te]|neq|n?g[te])?u?[dq] | vperm[it]2(p[sd]|[dq]) | vpm(ax|in)[su]q | vpmov(s|us)?(d[bw]|q[bdw])
    | vpro[lr]v?[dq] | vp?scatter[dq](p[sd]|[dq]) | vpsrav?q | vpternlog[dq] | vptestn?m[dq] | vshuf[fi](32x4|64x2)
    """,
    "avx512bw": r"""
    vdbpsadbw | vmovdqu(8|16) | vpabs[bw] | vpack[su]s(dw|wb) | vpadd(u?s)?[bw] | vpalignr | vpavg[bw] | vpblendm[bw]
    | vpbroadcast[bw] | vpcmp(eq|gt|n?l[te]|neq|n?g[te])?u?[bw] | vperm([it]2)?w | vp(extr|insr)[bw] | vpmadd(ubsw|wd)
    | vpm(ax|in)[su][bw] | vpmov[bw]2m | vpmovm2[bw] | vpmov(s|us)?wb | vpmov[sz]xbw | vpmul(hrs|hu?|l)w | vpsadbw
    | vpshuf(b|[hl]w) | vps(ll|ra|rl)v?w | vps[lr]ldq | vpsub(u?s)?[bw] | vptestn?m[bw] | vpunpck[hl](bw|wd)
    """,
    "avx512dq": r"""
    v(andn?|x?or)p[sd] | v(broadcast|extract|insert)[fi](32x2|32x8|64x2) | vcvtt?p[sd]2u?qq | vcvtu?qq2p[sd]
    | v(fpclass|range|reduce)[ps][sd] | vp(extr|insr)[dq] | vpmov[dq]2m | vpmovm2[dq] | vpmullq
    """,
    "avx512cd": r"vplzcnt[dq] | vpconflict[dq] | vpbroadcastm(b2q|w2d)",
    "avx512ifma": r"vpmadd52[hl]uq",
    "avx512vbmi": r"vperm([it]2)?b | vpmultishiftqb",
    "avx512_vbmi2": r"vp(compress|expand)[bw] | vpsh[lr]dv?[wdq]",
    "avx512_vnni": r"vpdp(bus|wss)ds?",
    "avx512_bitalg": r"vpopcnt[bw] | vpshufbitqmb",
    "avx512_vpopcntdq": r"vpopcnt[dq]",
    "gfni": r"vgf2p8(affine(inv)?q|mul)b",
    "vaes": r"vaes(enc|dec)(last)?",
    "vpclmulqdq": r"vpclmul([hl]q[hl])?qdq",
}
_AVX512 = {feature: re.compile(names, re.VERBOSE) for feature, names in _AVX512_NAMES.items()}
# EVEX instructions of one element, or of 128 bits in their only form: their length asks for nothing.
_ONE_LENGTH = re.compile(
    r"""
    v(?!p|broadcast)\w+s[sd] | vcvtt?s[sd]2u?si | vmov[dq] | vmov(hl|lh|h|l)p[sd] | vextractps | vinsertps
    | vp(extr|insr)[bwdq]
    """,
    re.VERBOSE,
)


# --- from an instruction to its features -----------------------------------------------------------------------------


def instruction_features(mnemonic: str, encoding: bytes) -> frozenset[str]:
    """Features that one x86-64 instruction needs, beyond those of every x86-64 CPU.

    Args:
        mnemonic: capstone's name, with prefixes such as "lock".
        encoding: the instruction's bytes.

    Raises:
        UnreadableCodeError: the name is in no table.
    """
    name = _plain_name(mnemonic)
    if name == "pextrw" and b"\x0f\x3a\x15" in encoding[:5]:
        return frozenset({"sse4_1"})  # the form that stores; SSE2 has another one, to a register
    # In 64-bit mode C4, C5 and 62 start a VEX or EVEX prefix and nothing else; prefixes of segment or address size may
    # stand before one.
    opcode = encoding.lstrip(b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3")
    if opcode[0] == 0xC5:
        features = _vex_features(name, is_256=bool(opcode[1] & 4), is_register_form=_is_register_form(opcode[3:]))
    elif opcode[0] == 0xC4:
        features = _vex_features(name, is_256=bool(opcode[2] & 4), is_register_form=_is_register_form(opcode[4:]))
    elif opcode[0] == 0x62:
        # A register form with the rounding bit set has a rounding mode where the length would stand.
        rounds = bool(opcode[3] & 0x10) and _is_register_form(opcode[5:])
        features = _evex_features(name, is_512=rounds or opcode[3] >> 5 & 3 == 2)
    else:
        features = _LEGACY.get(name)
    if features is None:
        raise UnreadableCodeError(f"what `{mnemonic}` ({encoding.hex(' ')}) needs is not known")
    return features


@cache
def _plain_name(mnemonic: str) -> str:
    """Without prefixes and without the predicate that capstone writes into the name: cmpps for cmpltps."""
    return re.sub(r"^(v?cmp)\w*([ps][sd])$", r"\1\2", mnemonic.split()[-1])


def _is_register_form(from_modrm: bytes) -> bool:
    return bool(from_modrm) and from_modrm[0] >> 6 == 3


@cache
def _vex_features(name: str, is_256: bool, is_register_form: bool) -> frozenset[str] | None:
    if name in _VEX_ONLY:
        return _VEX_ONLY[name]
    if _FMA.fullmatch(name):
        return frozenset({"avx", "fma"})
    if mask := _MASK_REGISTERS.fullmatch(name):
        operation, width = mask.groups()
        if width == "b" or (width == "w" and operation in ("add", "test")):
            return frozenset({"avx512f", "avx512dq"})
        return frozenset({"avx512f"} if width == "w" else {"avx512f", "avx512bw"})
    if name in ("vbroadcastss", "vbroadcastsd"):  # AVX has only the form that loads
        return frozenset({"avx", "avx2"} if is_register_form else {"avx"})
    features = _LEGACY.get(name.removeprefix("v")) if name.startswith("v") else None
    if features is None:
        return None
    cryptography = features & _WIDE.keys()
    if cryptography:
        return frozenset({"avx"}) | (frozenset(_WIDE[feature] for feature in cryptography) if is_256 else cryptography)
    is_integer = (name.startswith("vp") and name != "vptest") or name in ("vmpsadbw", "vmovntdqa")
    return frozenset({"avx", "avx2"} if is_256 and is_integer else {"avx"})


@cache
def _evex_features(name: str, is_512: bool) -> frozenset[str] | None:
    extension = next((feature for feature, names in _AVX512.items() if names.fullmatch(name)), None)
    if extension is None:
        has_vex_form = name in _VEX_ONLY or _FMA.fullmatch(name) or name.removeprefix("v") in _LEGACY
        if not (has_vex_form and name.startswith("v")):
            return None
        extension = "avx512f"
    length = frozenset() if is_512 or _ONE_LENGTH.fullmatch(name) else frozenset({"avx512vl"})
    return length | {"avx512f", extension}
