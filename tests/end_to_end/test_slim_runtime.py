"""The runtime alone: a fresh process in which the compiler's packages cannot be imported."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

FORBIDDEN = {"torch", "transformers", "model_defs", "aot_compiler", "pydantic", "gguf", "yaml", "jinja2"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"{name} is forbidden here", name=name)

sys.meta_path.insert(0, Refuse())
import runtime
from runtime import LLM, SamplingParams

llm = LLM(sys.argv[1])
rows = llm.embed([5, 6, 7])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
outputs = llm.generate([[5, 6, 7], {"prompt_embeds": rows}, "the quick fox"], params)
assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
assert len(outputs[2].outputs[0].token_ids) == 4
assert llm.stats["compilations"] == 0
program = runtime.load(sys.argv[1], layout="tp1")
assert "decode_b1_c32" in program.entries
program.close()
llm.close()
loaded = {name.split(".")[0] for name in sys.modules} & FORBIDDEN
assert not loaded, loaded
print("generated", outputs[0].outputs[0].token_ids)
"""


def test_it_imports_loads_and_generates_without_the_compiler(tiny_artifact: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_artifact)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("generated [")
