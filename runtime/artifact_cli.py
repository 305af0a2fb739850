"""``aot-artifact``: what an artifact is, and whether it is whole."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from artifacts import command_line
from artifacts.folder import Artifact, open_artifact

app = typer.Typer(
    name="aot-artifact",
    help="Look into an artifact, and check that it is whole.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


@app.command()
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


@app.command()
def verify(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders of artifacts.")]) -> None:
    """Read every file and compare sizes and digests with the manifest; exit 1 when one differs."""
    for path in paths:
        artifact = open_artifact(path, verify=True)
        files = artifact.manifest.files
        size = sum(record.size for record in files.values())
        typer.echo(f"{path}: {len(files)} files, {decimal(size)}, all as the manifest says")


def _print(artifact: Artifact, console: Console) -> None:
    manifest = artifact.manifest
    model, target, cache = manifest.model, manifest.target, manifest.kv_cache
    weights = "without weights" if manifest.weights is None else f"{len(manifest.weights)} tensors"
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items()))
    facts = {
        "model": f"{model.architecture} from {model.source}",
        "shape": f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}, {model.dtype}",
        "target": f"{target.platform} {target.architecture}, isa {target.isa}",
        "cache": f"{cache.blocks} blocks of {cache.block_size} tokens, {cache.dtype}",
        "weights": weights,
        "toolchain": tools,
        "load": f'runtime.load("{artifact.root}")',
    }
    for name, fact in facts.items():
        console.print(f"{name:10} {fact}", highlight=False, markup=False)
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
