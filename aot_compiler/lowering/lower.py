"""Lower a traced entry to the HLO module that every target compiles."""

import hashlib
from dataclasses import dataclass

from aot_compiler import xla
from aot_compiler.lowering.interpreter import run_entry
from aot_compiler.lowering.lint import lint
from aot_compiler.lowering.normal_form import normalise
from aot_compiler.trace import TracedEntry
from artifacts.signature import EntrySignature


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredEntry:
    """One entry as the bytes that go to a target's compiler."""

    signature: EntrySignature
    hlo: bytes
    """A serialised HloModuleProto in normal form."""
    sha256: str
    """Digest of ``hlo``, in hex."""


def lower(traced: TracedEntry) -> LoweredEntry:
    """Lower, bring into normal form, and lint.

    Raises:
        UnsupportedOperatorError: an operator without a handler.
        LintError: the module holds what an accelerator's compiler would refuse.
    """
    inputs = (*traced.signature.inputs, *traced.caches, *traced.parameters)
    outputs = (*traced.signature.outputs, *traced.caches)
    raw = xla.lower_to_hlo(lambda *arguments: run_entry(traced, arguments), inputs)
    first_cache = len(traced.signature.inputs), len(traced.signature.outputs)
    hlo = normalise(
        raw,
        name=traced.signature.name,
        parameter_names=[spec.name for spec in inputs],
        output_names=[spec.name for spec in outputs],
        aliases={first_cache[1] + i: first_cache[0] + i for i in range(len(traced.caches))},
    )
    lint(hlo, traced.signature.name)
    return LoweredEntry(signature=traced.signature, hlo=hlo, sha256=hashlib.sha256(hlo).hexdigest())
