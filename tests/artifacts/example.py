"""A small artifact, whole in every respect but that its graph and program are not real ones."""

import hashlib
from pathlib import Path

import numpy as np

from artifacts.manifest import (
    FORMAT_VERSION,
    EntryRecord,
    KvCacheRecord,
    LayoutRecord,
    Manifest,
    ModelRecord,
    ProgramRecord,
    TargetRecord,
    WeightRecord,
)
from artifacts.safetensors_file import write_tensors
from artifacts.signature import TensorSpec, entry_signature
from artifacts.writer import ArtifactWriter

PARAMETERS = (
    TensorSpec(name="model.embed_tokens.weight", shape=(7, 3), dtype="float32"),
    TensorSpec(name="model.norm.weight", shape=(3,), dtype="float32"),
    TensorSpec(name="lm_head.weight", shape=(7, 3), dtype="float32"),
)
CACHES = tuple(TensorSpec(name=f"layers.0.{part}", shape=(5, 1, 4, 2), dtype="float32") for part in "kv")


def add_example(writer: ArtifactWriter, revision: int = 0, *, chat_template: bool = True) -> Manifest:
    """Write all files of the example, in the pipeline's order, and return its manifest.

    Args:
        writer: an entered writer.
        revision: 0 to 9. Every file differs from that of another revision, in the same number of bytes.
        chat_template: whether there is one.
    """
    graph = f"graph {revision}".encode()
    graph_file = writer.add_bytes(f"graphs/{hashlib.sha256(graph).hexdigest()}.hlo.pb", graph)
    weights_file = writer.add_stream(
        "weights/{sha256}.safetensors",
        lambda out: write_tensors(out, PARAMETERS, lambda name: example_tensor(name, revision)),
    )
    program_file = writer.add_program("cpu", "xla", f"program {revision}".encode())
    writer.add_bytes("tokenizer/tokenizer.json", b'{"version": "%d"}' % revision)
    if chat_template:
        writer.add_bytes("tokenizer/chat_template.jinja", b"{{ messages }} %d" % revision)
    writer.add_bytes("config.yaml", b"output: revision-%d\n" % revision)
    signature = entry_signature("decode", rows=1, context=8, block_size=4, hidden_size=3, vocab_size=7, dtype="float32")
    entry = EntryRecord(
        signature=signature, graph=graph_file, program=ProgramRecord(file=program_file, requires=("avx2",))
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        self_digest="",
        toolchain={"jaxlib": "0.10.2", "torch": "2.13.0"},
        model=ModelRecord(
            architecture="LlamaForCausalLM",
            source="tiny",
            dtype="float32",
            vocab_size=7,
            hidden_size=3,
            num_layers=1,
            max_position_embeddings=16,
            embedding="model.embed_tokens.weight",
            eos_token_ids=(0, 2),
        ),
        target=TargetRecord(platform="cpu", architecture="x86_64", isa="x86-64-v3"),
        kv_cache=KvCacheRecord(block_size=4, blocks=5, dtype="float32"),
        layouts=(LayoutRecord(name="tp1", ranks=1, caches=CACHES, parameters=PARAMETERS, entries=(entry,)),),
        weights={spec.name: WeightRecord(file=weights_file, shape=spec.shape, dtype=spec.dtype) for spec in PARAMETERS},
        files=dict(writer.files),
    )


def example_tensor(name: str, revision: int) -> np.ndarray:
    """One of ``PARAMETERS``."""
    spec = next(spec for spec in PARAMETERS if spec.name == name)
    return np.arange(np.prod(spec.shape), dtype=np.float32).reshape(spec.shape) + len(name) + revision


def build_example(output: Path, revision: int = 0, *, chat_template: bool = True) -> Manifest:
    """Build the example in ``output``."""
    with ArtifactWriter(output) as writer:
        manifest = add_example(writer, revision, chat_template=chat_template)
        writer.commit(manifest)
    return manifest


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
