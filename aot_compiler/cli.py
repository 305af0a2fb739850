"""``aot-compile``: build an artifact from a configuration, or show what would be built."""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from artifacts import command_line
from artifacts.errors import MissingPackageError

app = typer.Typer(
    name="aot-compile",
    help="Compile a language model ahead of time, from a YAML configuration to an artifact.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PACKAGES = ("torch", "pydantic", "yaml", "gguf", "huggingface_hub", "capstone", "elftools")
"""Modules of the extra ``compile``."""

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="The YAML configuration.", metavar="FILE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key, e.g. buckets.decode=[1,8]. May be repeated.", metavar="KEY=VALUE"),
]


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{app.info.name} {version('aot-compiler')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def compile_command(
    context: typer.Context,
    config: ConfigOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the artifact; overrides the file.", metavar="DIR")
    ] = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Compile processes; one per core by default.", min=1, max=256, metavar="N"),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights/--no-weights",
            help="Pack weights; or make graphs and programs alone, to check that a model compiles, or on a build host "
            "without the checkpoint.",
        ),
    ] = True,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Build the artifact of a configuration: every graph compiled, weights once, a manifest over all."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context.invoked_subcommand, context)
        return
    path = _required(config)
    _check_packages()
    from aot_compiler.config_file import load_config
    from aot_compiler.pipeline import build
    from aot_compiler.progress import BuildView

    loaded = load_config(path, overrides or [])
    with BuildView(Console(stderr=True), loaded.config, output=output, with_weights=weights) as view:
        artifact = build(loaded, output=output, with_weights=weights, workers=workers, report=view.report)
    view.summary(artifact)


@app.command("plan")
def plan_command(
    config: ConfigOption = None,
    overrides: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would be built: entries, shapes, bytes. Nothing is read but headers, and nothing is written."""
    path = _required(config)
    _check_packages()
    from aot_compiler.config_file import load_config
    from aot_compiler.plan import make_plan
    from aot_compiler.plan_view import plan_as_json, print_plan

    plan = make_plan(load_config(path, overrides or []), with_weights=False)
    if json:
        typer.echo(plan_as_json(plan))
    else:
        print_plan(plan, Console())


@app.command("keys")
def keys_command(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show every key of the configuration: type, default, meaning."""
    _check_packages()
    from aot_compiler.config import describe_keys
    from aot_compiler.plan_view import print_keys

    keys = describe_keys()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(keys), indent=2))
    else:
        print_keys(keys, Console())


def _refuse_options_before(subcommand: str, context: typer.Context) -> None:
    """Options of the build say nothing to a subcommand; that they would be dropped must not go unseen."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{parameter.opts[0]} stands before {subcommand}; expected the subcommand before its options; write "
                f"aot-compile {subcommand} [options]"
            )


def _required(config: Path | None) -> Path:
    if config is None:
        raise typer.BadParameter("missing; expected the YAML configuration; add --config FILE", param_hint="--config")
    return config


def _check_packages() -> None:
    """The slim runtime installs without the compiler's packages; say so in words, and import none of them for it."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackageError(
            found=f"no Python module {', '.join(absent)}",
            expected="the compiler's packages, which the slim runtime does without",
            action="install the project with its extra `compile`: pip install '.[compile]' in a checkout",
        )


if __name__ == "__main__":
    main()
