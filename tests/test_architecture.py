"""The architecture as a test: which package may import what, and what no module may do."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "artifacts": {"artifacts", "msgspec", "google.protobuf", "safetensors", "numpy", "ml_dtypes", "fsspec"},
    "model_defs": {"model_defs", "artifacts.errors", "torch", "numpy", "safetensors", "gguf", "huggingface_hub"},
    "aot_compiler": {
        "aot_compiler", "model_defs", "artifacts", "torch", "jax", "jaxlib", "numpy", "msgspec", "pydantic",
        "pydantic_core", "yaml", "gguf", "tokenizers", "google.protobuf", "capstone", "elftools", "typer", "rich",
    },
    "runtime": {
        "runtime", "artifacts", "jax", "jaxlib", "numpy", "ml_dtypes", "safetensors", "msgspec", "tokenizers", "jinja2",
        "typer", "rich",
    },
}  # fmt: skip
STANDARD = {*sys.stdlib_module_names, "_typeshed"}  # the latter for the type checker alone
JAX_INTERNALS = {"aot_compiler/xla.py", "runtime/pjrt.py"}
JAX = (*JAX_INTERNALS, "aot_compiler/lowering/")
JINJA = "runtime/chat_template.py"
MAY_PRINT = {"artifacts/command_line.py"}
MODULES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
}


@dataclass(frozen=True)
class Import:
    """One imported module or name, dotted; lazy where it stands in a function or is for the type checker alone."""

    name: str
    line: int
    lazy: bool


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Every import of a module: statements anywhere in it, and calls of ``import_module`` with a literal name."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (Import(f"{module}.{alias.name}", node.lineno, lazy) for alias in names)
            case ast.ImportFrom():
                raise AssertionError(f"line {node.lineno}: relative import")
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in ("import_module", "__import__"):
                    yield Import(module, node.lineno, lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=orelse):
                for child in body:
                    yield from visit(child, True)
                for child in orelse:
                    yield from visit(child, lazy)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    return visit(tree, lazy=False)


IMPORTS = [(module, found) for module, tree in MODULES.items() for found in imports_of(tree)]


def below(name: str, parents: Set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def assert_none(faults: Iterable[str]) -> None:
    listed = "\n".join(faults)
    assert not listed, f"\n{listed}"


def test_every_package_is_here():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*MAY_IMPORT, "tests"}
    assert {"aot_compiler/pipeline.py", "aot_compiler/backends/cpu.py", "runtime/llm.py"} < set(MODULES)


def test_imports_are_found_wherever_they_stand():
    source = """
import a, b.c
from d import e
if TYPE_CHECKING:
    import f
else:
    import g
class C:
    import h
    def m(self):
        if True:
            from i.j import k
value = (lambda: importlib.import_module("l.m"))()
"""
    found = {(found.name, found.lazy) for found in imports_of(ast.parse(source))}
    eager, lazy = {"a", "b.c", "d.e", "g", "h"}, {"f", "i.j.k", "l.m"}
    assert found == {(name, False) for name in eager} | {(name, True) for name in lazy}
    with pytest.raises(AssertionError, match="line 1: relative import"):
        list(imports_of(ast.parse("from . import a")))


def test_a_package_imports_what_it_may():
    assert_none(
        f"{module}:{found.line} imports {found.name}"
        for module, found in IMPORTS
        if not below(found.name, MAY_IMPORT[module.split("/")[0]] | STANDARD)
    )


def test_jax_stands_in_few_places():
    assert_none(
        f"{module}:{found.line} imports {found.name}"
        for module, found in IMPORTS
        if (below(found.name, {"jax", "jaxlib"}) and not module.startswith(JAX))
        or (below(found.name, {"jaxlib", "jax._src"}) and module not in JAX_INTERNALS)
    )


def test_chat_templates_are_imported_on_first_use():
    assert_none(
        f"{module}:{found.line} imports {found.name}"
        for module, found in IMPORTS
        if (below(found.name, {"jinja2"}) and module != JINJA)
        or (below(found.name, {"runtime.chat_template"}) and not found.lazy)
    )


@pytest.mark.parametrize(
    ("packages", "extras"),
    [(("artifacts", "runtime"), ("chat",)), (("artifacts", "model_defs", "aot_compiler"), ("compile",))],
)
def test_what_is_imported_is_a_dependency(packages: tuple[str, ...], extras: tuple[str, ...]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(requirement for extra in extras for requirement in project["optional-dependencies"][extra]),
    ]
    declared = {canonical(re.split(r"[<>=!~ \[]", requirement)[0]) for requirement in requirements}
    distributions = packages_distributions()
    assert_none(
        f"{module}:{found.line} imports {found.name}, which comes with {names}"
        for module, found in IMPORTS
        if module.startswith(packages) and not below(found.name, set(MAY_IMPORT) | STANDARD)
        if not declared
        & (names := {canonical(name) for name in distributions.get(top_level(found.name), ["nothing installed"])})
    )


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def top_level(name: str) -> str:
    # A dependency of pydantic, of exactly one version, whose errors pydantic documents as its own.
    return "pydantic" if name.startswith("pydantic_core.") else name.split(".")[0]


def test_a_module_says_what_it_is():
    nameless = {"utils", "util", "helpers", "common", "misc"}
    for module, tree in MODULES.items():
        assert ast.get_docstring(tree) or not tree.body, f"{module} has no docstring"
        assert Path(module).stem not in nameless, f"{module}: name the idea instead"


def test_libraries_do_not_print():
    assert {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    } <= MAY_PRINT


def test_wheel_holds_every_module_and_its_types():
    for package in MAY_IMPORT:
        assert (ROOT / package / "py.typed").is_file()
    for module in MODULES:
        assert (ROOT / module).with_name("__init__.py").is_file(), f"{module} is in no package"
