"""The documentation says what is there: every key, every option, every link, and examples that parse."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import aot_compiler.cli
import runtime.artifact_cli
import runtime.cli
from aot_compiler.config import describe_keys
from aot_compiler.config_file import load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("artifacts/*.md")], key=lambda path: path.as_posix()
)
COMMANDS = {
    "aot-compile": aot_compiler.cli.app,
    "aot-artifact": runtime.artifact_cli.app,
    "aot-run": runtime.cli.app,
}


def keys_table() -> str:
    """What must stand between the two marks of docs/aot-compile.md."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in describe_keys():
        default = key.default if key.default in ("required", "none") else f"`{key.default}`"
        rows.append(f"| `{key.path}` | {key.type} | {default} | {key.text} |")
    return "\n".join(rows)


def test_table_of_keys_is_what_the_compiler_declares():
    page = (ROOT / "docs/aot-compile.md").read_text()
    table = re.search(r"<!-- keys -->\n(.*)\n<!-- /keys -->", page, re.DOTALL)
    assert table is not None
    assert table[1] == keys_table(), f"docs/aot-compile.md must hold this table:\n{keys_table()}"


@pytest.mark.parametrize("name", COMMANDS)
def test_page_of_a_command_names_its_subcommands_and_options_and_no_others(name: str):
    page = (ROOT / f"docs/{name}.md").read_text()
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]*", page)) == set(long_options(COMMANDS[name]))
    for subcommand in getattr(get_command(COMMANDS[name]), "commands", {}):
        assert f"\n## {subcommand}\n" in page


def long_options(app: typer.Typer) -> Iterator[str]:
    command = get_command(app)
    yield "--help"
    for part in (command, *getattr(command, "commands", {}).values()):
        for parameter in part.params:
            yield from (option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        assert linked.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], f"no heading for {target}"


def code_blocks(language: str) -> list:
    return [
        pytest.param(code, id=f"{page.name}-{number}")
        for page in PAGES
        for number, code in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        )
    ]


@pytest.mark.parametrize("code", code_blocks("python"))
def test_examples_in_python_parse_and_import_what_exists(code: str):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("code", code_blocks("yaml"))
def test_examples_in_yaml_are_configurations(code: str, tmp_path: Path):
    path = tmp_path / "example.yaml"
    path.write_text(code)
    assert load_config(path).config.output.startswith("compiled/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_ascii(page: Path):
    assert page.read_bytes().isascii()
