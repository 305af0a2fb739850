"""Load an artifact and generate: ``from runtime import LLM, SamplingParams``, or ``runtime.load`` for single steps.

Names are imported when they are first used: ``import runtime`` itself is cheap, and a command that only prints its help
does not wait for jax.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from artifacts.errors import (
    AotError,
    ArtifactError,
    ArtifactNotFoundError,
    ClosedError,
    CompilationForbiddenError,
    CorruptArtifactError,
    EntryInputError,
    EntryNotFoundError,
    FormatVersionError,
    LayoutNotFoundError,
    LoadOptionError,
    MissingCpuFeaturesError,
    PromptEmbedsError,
    PromptError,
    RequestError,
    SamplingParamsError,
    TargetMismatchError,
    UnfinishedArtifactError,
)

if TYPE_CHECKING:
    from runtime.llm import LLM
    from runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from runtime.program import Program, load
    from runtime.sampling import SamplingParams

__all__ = [
    "LLM",
    "AotError",
    "ArtifactError",
    "ArtifactNotFoundError",
    "ClosedError",
    "CompilationForbiddenError",
    "CompletionOutput",
    "CorruptArtifactError",
    "EntryInputError",
    "EntryNotFoundError",
    "FormatVersionError",
    "LayoutNotFoundError",
    "LoadOptionError",
    "Logprob",
    "MissingCpuFeaturesError",
    "Program",
    "PromptEmbedsError",
    "PromptError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "TargetMismatchError",
    "UnfinishedArtifactError",
    "load",
]

_MODULE_OF = {
    "LLM": "runtime.llm",
    "Program": "runtime.program",
    "CompletionOutput": "runtime.outputs",
    "Logprob": "runtime.outputs",
    "RequestMetrics": "runtime.outputs",
    "RequestOutput": "runtime.outputs",
    "SamplingParams": "runtime.sampling",
    "load": "runtime.program",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("aot-compiler")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
