"""A small configuration, ways to change and load it, and the words that faults of it quote."""

from collections.abc import Callable
from pathlib import Path

from aot_compiler.config import CompileConfig
from aot_compiler.config_file import load_config

VALID = """\
model:
  source: models/tiny
  dtype: float32
target: cpu
layouts: [tp1, tp4-sp]
buckets:
  prefill: [32, 128]
  decode: [1, 4]
  context: [256, 512]
kv_cache: {block_size: 32, tokens: 8192}
output: compiled/tiny
"""

BUCKET = "an integer from 1 to 1048576"
BUCKETS = "a list of one or more distinct integers from 1 to 1048576"
LAYOUT = "tp{N} or tp{N}-sp, N from 1 to 9999"
SOURCE = "a folder, a .gguf file, package:NAME/FILE.gguf or a hub id"
TOP = "model, target, layouts, buckets, kv_cache, output"

Faults = Callable[..., list[str]]
"""Of the fixture of that name."""


def edit(old: str, new: str) -> str:
    """VALID with one passage replaced."""
    assert VALID.count(old) == 1
    return VALID.replace(old, new)


def load(tmp_path: Path, text: str, *overrides: str) -> CompileConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides).config
