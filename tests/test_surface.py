"""What users and other programs rely on, as lists. Changing one is a decision: see CONTRIBUTING.md."""

import inspect
import tomllib
from dataclasses import fields
from pathlib import Path

import typer
from typer.main import get_command

import aot_compiler.cli
import runtime
import runtime.artifact_cli
import runtime.cli
from aot_compiler.config import describe_keys
from artifacts import errors
from runtime import LLM, Program, RequestOutput, SamplingParams
from runtime.outputs import CompletionOutput, Logprob, RequestMetrics

ROOT = Path(__file__).parent.parent
OUTPUTS = (RequestOutput, CompletionOutput, Logprob, RequestMetrics)


def parameters(app: typer.Typer) -> dict[str, list[str]]:
    """Of each command, "" for the one without a name: its options with all their spellings, and its arguments."""
    command = get_command(app)
    commands = {"": command, **getattr(command, "commands", {})}
    return {
        name: [" ".join([*part.opts, *part.secondary_opts]) for part in command.params]
        for name, command in commands.items()
        if command.params or name
    }


def public(owner: type) -> list[str]:
    return sorted(name for name in dir(owner) if not name.startswith("_"))


def test_commands_and_options():
    assert parameters(aot_compiler.cli.app) == {
        "": ["--config -c", "--output -o", "--set", "--workers", "--weights --no-weights", "--version"],
        "plan": ["--config -c", "--set", "--json"],
        "keys": ["--json"],
    }
    assert parameters(runtime.artifact_cli.app) == {
        "": ["--version"],
        "inspect": ["path", "--json"],
        "verify": ["paths"],
    }
    assert parameters(runtime.cli.app) == {
        "": ["--version"],
        "generate": [
            "path",
            "--prompt",
            "--prompt-token-ids",
            "--prompt-embeds",
            "--max-tokens",
            "--layout",
            "--chat",
            "--temperature",
            "--top-k",
            "--top-p",
            "--seed",
            "--stop",
            "--ignore-eos",
            "--logprobs",
            "--verify",
            "--threads",
            "--json",
        ],
        "bench": ["path", "--layout", "--entry", "--steps", "--seconds", "--threads", "--json"],
    }


def test_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "aot-compiler"
    assert project["scripts"] == {
        "aot-compile": "aot_compiler.cli:main",
        "aot-artifact": "runtime.artifact_cli:main",
        "aot-run": "runtime.cli:main",
    }
    assert sorted(project["optional-dependencies"]) == ["chat", "compile", "test"]


def test_configuration_keys():
    assert [key.path + (" (required)" if key.default == "required" else "") for key in describe_keys()] == [
        "model (required)",
        "model.source",
        "model.config",
        "model.dtype",
        "target",
        "target.platform",
        "target.isa",
        "layouts",
        "buckets (required)",
        "buckets.prefill (required)",
        "buckets.decode (required)",
        "buckets.context (required)",
        "kv_cache (required)",
        "kv_cache.block_size",
        "kv_cache.tokens (required)",
        "kv_cache.dtype",
        "output (required)",
    ]


def test_public_names_of_runtime():
    errors_of_runtime = {name for name in runtime.__all__ if name.endswith("Error")}
    assert set(runtime.__all__) - errors_of_runtime == {
        "LLM",
        "CompletionOutput",
        "Logprob",
        "Program",
        "RequestMetrics",
        "RequestOutput",
        "SamplingParams",
        "load",
    }
    assert {name for name in errors_of_runtime if getattr(runtime, name) is not getattr(errors, name)} == set()


def test_llm():
    assert public(LLM) == ["chat", "close", "embed", "generate", "max_model_len", "stats"]
    assert list(inspect.signature(LLM).parameters) == ["path", "layout", "preload", "warmup", "verify", "threads"]
    assert list(inspect.signature(LLM.generate).parameters) == ["self", "prompts", "sampling_params"]
    assert list(inspect.signature(LLM.chat).parameters) == [
        "self",
        "messages",
        "sampling_params",
        "add_generation_prompt",
    ]
    assert list(inspect.signature(LLM.embed).parameters) == ["self", "token_ids"]


def test_program(tiny_artifact: Path):
    parameters = inspect.signature(runtime.load).parameters
    assert list(parameters) == ["path", "layout", "verify", "preload", "warmup", "threads"]
    assert list(inspect.signature(Program.run).parameters) == ["self", "entry", "inputs"]
    assert {"close", "entries", "preload", "run", "stats", "warmup"} <= set(public(Program))
    program = runtime.load(tiny_artifact)
    program.close()
    assert sorted(program.stats) == [
        "compilations",
        "embedding_bytes_copied",
        "load_ms",
        "padding_rows",
        "programs",
        "programs_loaded",
        "rows",
        "steps",
    ]
    assert list(program.stats["load_ms"]) == ["manifest", "client", "weights", "caches"]


def test_sampling_params():
    assert {field.name: field.default for field in fields(SamplingParams)} == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": None,
        "max_tokens": 16,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
    }


def test_outputs():
    assert {owner.__name__: [field.name for field in fields(owner)] for owner in OUTPUTS} == {
        "RequestOutput": ["request_id", "prompt", "prompt_token_ids", "outputs", "finished", "error", "metrics"],
        "CompletionOutput": [
            "index",
            "text",
            "token_ids",
            "cumulative_logprob",
            "logprobs",
            "finish_reason",
            "stop_reason",
        ],
        "Logprob": ["logprob", "rank", "decoded_token"],
        "RequestMetrics": ["arrival_time", "time_to_first_token", "total_time", "prefill_tokens", "output_tokens"],
    }


def test_errors_and_exit_codes():
    tree: dict[str, tuple[str, int]] = {
        name: (error.__bases__[0].__name__, error.exit_code)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.AotError)
    }
    assert tree == {
        "AotError": ("Exception", 2),
        "ConfigError": ("AotError", 2),
        "PlanError": ("AotError", 2),
        "OutputFolderError": ("AotError", 2),
        "CheckpointError": ("AotError", 2),
        "CheckpointNotFoundError": ("CheckpointError", 2),
        "CorruptCheckpointError": ("CheckpointError", 2),
        "CheckpointTensorError": ("CheckpointError", 2),
        "UnsupportedModelError": ("AotError", 2),
        "MissingPackageError": ("AotError", 2),
        "CompileError": ("AotError", 2),
        "UnsupportedOperatorError": ("CompileError", 2),
        "LintError": ("CompileError", 2),
        "ToolMissingError": ("CompileError", 3),
        "ArtifactError": ("AotError", 2),
        "ArtifactNotFoundError": ("ArtifactError", 2),
        "UnfinishedArtifactError": ("ArtifactError", 2),
        "FormatVersionError": ("ArtifactError", 2),
        "CorruptArtifactError": ("ArtifactError", 1),
        "TargetMismatchError": ("ArtifactError", 2),
        "MissingCpuFeaturesError": ("TargetMismatchError", 2),
        "LayoutNotFoundError": ("AotError", 2),
        "EntryNotFoundError": ("AotError", 2),
        "EntryInputError": ("AotError", 2),
        "ClosedError": ("AotError", 2),
        "LoadOptionError": ("AotError", 2),
        "RequestError": ("AotError", 2),
        "PromptError": ("RequestError", 2),
        "PromptEmbedsError": ("RequestError", 2),
        "SamplingParamsError": ("RequestError", 2),
        "CompilationForbiddenError": ("AotError", 2),
    }
    drawn = "".join(character if character.isascii() else " " for character in errors.__doc__ or "").split()
    assert set(tree) <= set(drawn)
