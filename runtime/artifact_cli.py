"""``aot-artifact``: what an artifact is, and whether it is whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from artifacts import command_line
from artifacts.errors import AotError
from artifacts.folder import Artifact, open_artifact

app = typer.Typer(
    name="aot-artifact",
    help="Look into an artifact, and check that it is whole.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LARGE = 200 * 10**6
"""Bytes that take long enough to read for a word about it."""


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{app.info.name} {version('aot-compiler')}")
        raise typer.Exit


@app.callback()
def aot_artifact(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look into an artifact, and check that it is whole."""


@app.command(short_help="Show what an artifact is.")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the artifact.")],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest's facts as JSON.")] = False,
) -> None:
    """Show what an artifact is: model, target, layouts, entries, sizes, toolchain."""
    artifact = open_artifact(path)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(artifact.manifest, order="sorted"), indent=1))
    else:
        _print(artifact, Console())


@app.command(short_help="Check that artifacts are whole.")
def verify(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders of artifacts.")]) -> None:
    """Read every file and compare sizes and digests with the manifest; exit 1 when one differs."""
    code = 0
    for path in paths:
        try:
            files = open_artifact(path).manifest.files
            size = sum(record.size for record in files.values())
            with _waiting(f"{path}: reading {decimal(size)}", size):
                open_artifact(path, verify=True)
            typer.echo(f"{path}: {len(files)} files, {decimal(size)}, all as the manifest says")
        except AotError as error:
            command_line.report(error)
            code = max(code, error.exit_code)
    raise typer.Exit(code)


@contextmanager
def _waiting(message: str, size: int) -> Iterator[None]:
    """Show on a terminal that a large artifact is being read."""
    console = Console(stderr=True)
    if console.is_terminal and size > _LARGE:
        with console.status(message):
            yield
    else:
        yield


def _print(artifact: Artifact, console: Console) -> None:
    for name, fact in _facts(artifact):
        console.print(f"{name:10} {fact}", highlight=False, markup=False, soft_wrap=True)
    manifest = artifact.manifest
    for layout in manifest.layouts:
        table = Table(title=f"layout {layout.name}, {layout.ranks} rank(s)", title_justify="left")
        table.add_column("entry", no_wrap=True)
        table.add_column("graph", justify="right")
        table.add_column("program", justify="right")
        table.add_column("needs")
        for entry in layout.entries:
            program = entry.program
            table.add_row(
                entry.signature.name,
                decimal(manifest.files[entry.graph].size),
                decimal(manifest.files[program.file].size) if program else "missing",
                " ".join(program.requires) if program else "",
            )
        console.print(table)


def _facts(artifact: Artifact) -> Iterator[tuple[str, str]]:
    manifest = artifact.manifest
    model, target, cache = manifest.model, manifest.target, manifest.kv_cache
    yield "model", f"{model.architecture} from {model.source}"
    yield (
        "shape",
        f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}, {model.dtype}",
    )
    yield "target", f"{target.platform} {target.architecture}, isa {target.isa}"
    blocks = cache.blocks - 1
    yield (
        "cache",
        f"{blocks * cache.block_size} tokens ({blocks} blocks of {cache.block_size}, and the null block), "
        f"{cache.dtype}",
    )
    contexts = (entry.signature.context for layout in manifest.layouts for entry in layout.entries)
    yield "longest", f"{max(contexts, default=0)} tokens in one sequence, prompt and answer together"
    if manifest.weights is None:
        yield "weights", "none (built with --no-weights)"
    else:
        size = sum(record.size for path, record in manifest.files.items() if path.startswith("weights/"))
        yield "weights", f"{len(manifest.weights)} tensors, {decimal(size)}"
    yield "tokenizer", _tokenizer(artifact)
    yield "toolchain", ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items()))
    yield "load", f'runtime.LLM("{artifact.root}")   prompts in, tokens out'
    yield "", f'runtime.load("{artifact.root}")  single steps'


def _tokenizer(artifact: Artifact) -> str:
    files = artifact.manifest.files
    if "tokenizer/tokenizer.json" not in files:
        return "none: prompts are token ids or embeddings"
    return "yes, " + ("with" if "tokenizer/chat_template.jinja" in files else "without") + " a chat template"


if __name__ == "__main__":
    main()
