"""``aot-compile``: build an artifact from a configuration, or show what would be built."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from artifacts import command_line
from artifacts.errors import ToolMissingError

app = typer.Typer(
    name="aot-compile",
    help="Compile a language model ahead of time, from a YAML configuration to an artifact.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="The YAML configuration.", metavar="FILE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key, e.g. buckets.decode=[1,8]. May be repeated.", metavar="KEY=VALUE"),
]


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


@app.callback(invoke_without_command=True)
def compile_command(
    context: typer.Context,
    config: ConfigOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the artifact; overrides the file.", metavar="DIR")
    ] = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Compile processes; one per core by default.", min=1, max=256)
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Pack weights, or build graphs and programs alone.")
    ] = True,
) -> None:
    """Build the artifact of a configuration: every graph compiled, weights once, a manifest over all."""
    if context.invoked_subcommand is not None:
        return
    path = _required(config, context)
    _check_packages()
    from aot_compiler.config_file import load_config
    from aot_compiler.pipeline import build
    from aot_compiler.progress import BuildView

    with BuildView(Console(stderr=True)) as view:
        artifact = build(
            load_config(path, overrides or []),
            output=output,
            with_weights=weights,
            workers=workers,
            report=view.report,
        )
    view.summary(artifact)


@app.command("plan")
def plan_command(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would be built: entries, shapes, bytes. Nothing is read but headers, and nothing is written."""
    path = _required(config, context)
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
def keys_command() -> None:
    """Show every key of the configuration: type, default, meaning."""
    _check_packages()
    from aot_compiler.config import describe_keys
    from aot_compiler.plan_view import print_keys

    print_keys(describe_keys(), Console())


def _required(config: Path | None, context: typer.Context) -> Path:
    config = config or (context.parent.params.get("config") if context.parent else None)
    if config is None:
        raise typer.BadParameter("missing; expected the YAML configuration; add --config FILE", param_hint="--config")
    return config


def _check_packages() -> None:
    """The slim runtime installs without the compiler's packages; say so in words."""
    try:
        import pydantic  # noqa: F401
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise ToolMissingError(
            found=f"package {error.name} is not installed",
            expected="the compiler's packages, which the slim runtime does without",
            action="pip install '.[compile]' in a checkout",
        ) from error
