"""Every way to fail that a user can meet, one class each.

    AotError
    ├── ConfigError                     the YAML file or a --set override
    ├── PlanError                       a configuration that is well-formed but cannot be built
    ├── OutputFolderError               where the artifact should go
    ├── CheckpointError
    │   ├── CheckpointNotFoundError
    │   ├── CorruptCheckpointError      truncated or unreadable file
    │   └── CheckpointTensorError       missing, unexpected or wrongly shaped tensors
    ├── UnsupportedModelError           architecture or option without an implementation
    ├── MissingPackageError             Python packages of an extra that is not installed
    ├── CompileError
    │   ├── UnsupportedOperatorError    an ATen operator without a lowering
    │   ├── LintError                   HLO that an accelerator's compiler would refuse
    │   └── ToolMissingError            a target's compiler is not on this machine (exit code 3)
    ├── ArtifactError
    │   ├── ArtifactNotFoundError       no such folder, or not an artifact
    │   ├── UnfinishedArtifactError     a build was interrupted, or parts are still to be compiled
    │   ├── FormatVersionError          written by a newer or unknown format
    │   ├── CorruptArtifactError        sizes, digests or cross references that disagree (exit code 1)
    │   └── TargetMismatchError         programs for another platform or another toolchain
    │       └── MissingCpuFeaturesError this CPU lacks instructions that the program uses
    ├── LayoutNotFoundError             a layout that the artifact does not hold
    ├── EntryNotFoundError              an entry that the layout does not hold
    ├── EntryInputError                 inputs of a step that do not fit the entry's signature or the cache
    ├── ClosedError                     a program that has been closed, or was loaded in another process
    ├── LoadOptionError                 an option of loading that is out of its range
    ├── RequestError                    one request is at fault; the engine and its neighbours go on
    │   ├── PromptError                 empty, too long, ids out of range
    │   ├── PromptEmbedsError           shape, width, dtype, finiteness or file kind of embeddings
    │   └── SamplingParamsError
    └── CompilationForbiddenError       something tried to trace or compile after load

Each message reads ``<what was found>; expected <rule or list>; <what to do>``.
"""


class AotError(Exception):
    """Root of all errors that this project raises on purpose.

    Args:
        found: what was found, naming the file, key, tensor or value.
        expected: the rule, or the list of what is accepted, without the word "expected".
        action: what to do about it.
    """

    exit_code = 2
    """Exit code of a command that ends with this error."""

    def __init__(self, found: str, expected: str, action: str) -> None:
        super().__init__(found, expected, action)
        self.found = found
        self.expected = expected
        self.action = action

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}; {self.action}"


class ConfigError(AotError):
    """The YAML file or an override is at fault; ``faults`` holds every fault found, not only the first."""

    def __init__(
        self, faults: "list[ConfigError] | None" = None, *, found: str = "", expected: str = "", action: str = ""
    ):
        super().__init__(found, expected, action)
        self.faults: list[ConfigError] = faults or [self]

    def __str__(self) -> str:
        if self.faults == [self]:
            return super().__str__()
        return "\n".join(str(fault) for fault in self.faults)


class PlanError(AotError):
    """A well-formed configuration that cannot be built."""


class OutputFolderError(AotError):
    """The output folder is not empty, not an artifact, or not writable."""


class CheckpointError(AotError):
    """A checkpoint is at fault."""


class CheckpointNotFoundError(CheckpointError):
    """Nothing is where ``model.source`` points."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint file is truncated or unreadable."""


class CheckpointTensorError(CheckpointError):
    """Tensors are missing, unexpected or wrongly shaped."""


class UnsupportedModelError(AotError):
    """The model's architecture, or an option of it, has no implementation."""


class MissingPackageError(AotError):
    """Python packages are not installed that this use needs."""


class CompileError(AotError):
    """Tracing, lowering or compiling failed."""


class UnsupportedOperatorError(CompileError):
    """An ATen operator has no lowering."""


class LintError(CompileError):
    """A module holds what an accelerator's compiler would refuse."""


class ToolMissingError(CompileError):
    """A target's compiler is not on this machine; the artifact is complete but for its programs."""

    exit_code = 3


class ArtifactError(AotError):
    """An artifact is at fault."""


class ArtifactNotFoundError(ArtifactError):
    """No such folder, or a folder that is not an artifact."""


class UnfinishedArtifactError(ArtifactError):
    """The build was interrupted, or the artifact lacks a part that this use needs."""


class FormatVersionError(ArtifactError):
    """The manifest's format version is not one that this package reads."""


class CorruptArtifactError(ArtifactError):
    """Files and manifest disagree."""

    exit_code = 1


class TargetMismatchError(ArtifactError):
    """The programs are for another platform or another toolchain."""


class MissingCpuFeaturesError(TargetMismatchError):
    """This CPU lacks instructions that the program uses."""


class LayoutNotFoundError(AotError):
    """The artifact does not hold the layout."""


class EntryNotFoundError(AotError):
    """The layout does not hold the entry."""


class EntryInputError(AotError):
    """Inputs of a step do not fit the entry's signature, or point outside the cache or the vocabulary."""


class ClosedError(AotError):
    """The program has been closed, or was loaded before a fork."""


class LoadOptionError(AotError):
    """An option of loading is out of its range."""


class RequestError(AotError):
    """One request is at fault; the engine and its neighbours go on."""


class PromptError(RequestError):
    """The prompt is empty, too long, or holds ids out of range."""


class PromptEmbedsError(RequestError):
    """Embeddings of a wrong shape, width, dtype or file kind, or with values that are not finite."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of its range."""


class CompilationForbiddenError(AotError):
    """Something tried to trace or compile after load."""
