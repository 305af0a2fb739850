"""The runtime imports without the compiler's packages: in fresh processes where these cannot be imported at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parent.parent.parent
COMPILER = ("torch", "transformers", "model_defs", "aot_compiler")
COMPILE_EXTRA = ("pydantic", "yaml", "gguf", "huggingface_hub", "capstone", "elftools")
CHAT_EXTRA = ("jinja2",)
BLOCK = """
import importlib, json, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not to be imported", name=name)

blocked = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocker())
"""


def run_without(blocked: tuple[str, ...], script: str) -> list[str]:
    """Output of a script in a fresh process without these packages, and its top-level modules as the last line."""
    script = f"{BLOCK}{script}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    command = [sys.executable, "-c", script, json.dumps(blocked)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_blocker_blocks():
    refusal, modules = run_without(
        COMPILER,
        """
try:
    import aot_compiler.pipeline
except ModuleNotFoundError as error:
    print(error)
""",
    )
    assert refusal == "aot_compiler is not to be imported"
    assert "aot_compiler" not in json.loads(modules)


def test_every_public_name_without_the_compiler():
    names, modules = run_without(
        (*COMPILER, *COMPILE_EXTRA),
        """
import runtime
from runtime import LLM, SamplingParams
missing = [name for name in runtime.__all__ if not hasattr(runtime, name)]
print(json.dumps([runtime.load.__module__, LLM.__module__, *missing]))
""",
    )
    assert json.loads(names) == ["runtime.program", "runtime.llm"]
    assert not {*COMPILER, *COMPILE_EXTRA} & set(json.loads(modules))


def test_every_module_without_any_extra():
    imported, modules = run_without(
        (*COMPILER, *COMPILE_EXTRA, *CHAT_EXTRA),
        """
import runtime
names = [module.name for module in pkgutil.iter_modules(runtime.__path__, "runtime.")]
names.remove("runtime.chat_template")
print(len([importlib.import_module(name) for name in names]))
""",
    )
    assert int(imported) == len(list((ROOT / "runtime").glob("*.py"))) - 2  # __init__, chat_template
    assert not {*COMPILER, *COMPILE_EXTRA, *CHAT_EXTRA} & set(json.loads(modules))


def test_import_alone_is_cheap():
    (modules,) = run_without((), "import runtime; assert set(runtime.__all__) < set(dir(runtime))")
    assert not {"jax", "numpy", "tokenizers"} & set(json.loads(modules))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'runtime' has no attribute 'Llm'$"):
        _ = runtime.Llm
