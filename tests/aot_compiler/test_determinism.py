"""The bytes of a module depend on the model, the entry and the versions: not on process, hash seed or source folder."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from aot_compiler.lowering import lower
from aot_compiler.trace import trace
from artifacts.hlo import entry_computation, parse_hlo
from artifacts.signature import EntrySignature, TensorSpec, entry_signature
from model_defs.registry import build_backbone

PACKAGES = ("artifacts", "model_defs", "aot_compiler")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0},
}
PROGRAM = (
    "import aot_compiler.trace, determinism; print(aot_compiler.trace.__file__, *determinism.digests(), sep='\\n')"
)


def signature(kind: str, **changes: int) -> EntrySignature:
    shape = {"rows": 4, "context": 32, "block_size": 8, "hidden_size": 32, "vocab_size": 97} | changes
    return entry_signature(kind, **shape, dtype="float32")  # type: ignore[arg-type]


@functools.cache
def modules() -> dict[str, bytes]:
    """A prefill and a decode of the small Llama."""
    backbone = build_backbone(CONFIG, "config.json", 8)
    caches = [
        TensorSpec(name=f"layers.{i}.{part}", shape=(9, 2, 8, 8), dtype="float32") for i in range(2) for part in "kv"
    ]
    parameters = [
        TensorSpec(name=name, shape=tuple(parameter.shape), dtype="float32")
        for name, parameter in backbone.named_parameters()
    ]
    return {kind: lower(trace(backbone, signature(kind), caches, parameters)).hlo for kind in ("prefill", "decode")}


def digests() -> list[str]:
    return [hashlib.sha256(hlo).hexdigest() for hlo in modules().values()]


def test_same_bytes_in_every_process_hash_seed_and_source_folder(tmp_path: Path) -> None:
    """One process runs the sources where they are, another a copy of them elsewhere, with another hash seed."""
    here, elsewhere = Path(__file__).parents[2], tmp_path / "a folder elsewhere"
    for package in PACKAGES:
        shutil.copytree(here / package, elsewhere / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(__file__, tmp_path / "determinism.py")
    processes = {
        folder: subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(folder), str(tmp_path)])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, folder in (("0", here), ("1", elsewhere))
    }
    expected = digests()
    for folder, process in processes.items():
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert printed.splitlines() == [str(folder / "aot_compiler" / "trace.py"), *expected]


def test_bytes_name_no_folder_of_this_machine() -> None:
    for hlo in modules().values():
        assert b".py" not in hlo
        assert str(Path(__file__).parents[2]).encode() not in hlo
        assert os.path.dirname(os.__file__).encode() not in hlo


def test_entries_have_the_same_inputs_in_the_same_order() -> None:
    """A prefill takes ``output_positions`` besides, and nothing else differs, whatever the shapes."""
    shared = ["input_ids", "positions", "inputs_embeds", "is_token_ids", "slot_mapping", "block_table"]
    for changes in (
        {},
        {"rows": 1},
        {"rows": 16},
        {"context": 64, "block_size": 16},
        {"hidden_size": 8, "vocab_size": 3},
    ):
        decode, prefill = signature("decode", **changes), signature("prefill", **changes)
        assert [spec.name for spec in decode.inputs] == shared
        assert [spec.name for spec in prefill.inputs] == [*shared, "output_positions"]
        assert [spec.name for spec in decode.outputs] == [spec.name for spec in prefill.outputs] == ["logits"]


def test_modules_have_the_names_of_signature_caches_and_parameters_in_this_order() -> None:
    caches = [f"layers.{i}.{part}" for i in range(2) for part in "kv"]
    parameters = [name for name, _ in build_backbone(CONFIG, "config.json", 8).named_parameters()]
    for kind, hlo in modules().items():
        module = parse_hlo(hlo, kind)
        inputs = [spec.name for spec in signature(kind).inputs]
        assert list(module.host_program_shape.parameter_names) == [*inputs, *caches, *parameters]
        (root,) = [each for each in entry_computation(module).instructions if each.opcode == "tuple"]
        assert [each.value for each in root.frontend_attributes.map] == [",".join(["logits", *caches])]
        aliases = {alias.output_shape_index[0]: alias.parameter_number for alias in module.input_output_alias.entries}
        assert aliases == {1 + i: len(inputs) + i for i in range(len(caches))}
