"""Processes of a build that are killed: what is left behind, and what the user is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artifacts.errors import UnfinishedArtifactError
from artifacts.folder import open_artifact

YAML = """\
model: {{config: config.json, dtype: float32}}
buckets: {{prefill: [8, 16, 32], decode: [1, 2, 4], context: [32, 64]}}
kv_cache: {{block_size: 8, tokens: 64}}
output: {output}
"""
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """A build of twelve entries, which takes several seconds."""
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "model.yaml").write_text(YAML.format(output=tmp_path / "out"))
    command = [sys.executable, "-m", "aot_compiler.cli", "--config", str(tmp_path / "model.yaml"), "--no-weights"]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The compile workers, once there are some."""
    for _ in range(600):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if workers:
            return workers
        time.sleep(0.05)
    raise AssertionError("no worker was started")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_build_leaves_no_worker_and_an_unfinished_folder(tmp_path: Path, kill: signal.Signals) -> None:
    process = start(tmp_path)
    workers = workers_of(process)
    time.sleep(1.0)
    process.send_signal(kill)
    process.communicate(timeout=30)  # ends only when no worker holds the pipe
    assert process.returncode == -kill
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    with pytest.raises(UnfinishedArtifactError):
        open_artifact(tmp_path / "out")


def test_a_killed_worker_ends_the_build_in_one_line(tmp_path: Path) -> None:
    process = start(tmp_path)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.strip().splitlines()[-1].startswith("error: the compiler's process died at ")
    assert "Traceback" not in err
