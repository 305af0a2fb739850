"""Ctrl-C during a build, as a terminal sends it: to every process of the command at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from artifacts.errors import ArtifactNotFoundError, UnfinishedArtifactError
from artifacts.folder import open_artifact

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")

ROOT = Path(__file__).parents[2]
INTERRUPTED = "interrupted; the same command starts again"
YAML = """\
model: {{source: {source}, dtype: float32}}
buckets: {{prefill: [8, 16], decode: [1, 2, 3, 4, 5, 6, 7, 8], context: [32, 64, 96, 128]}}
kv_cache: {{block_size: 8, tokens: 128}}
output: {output}
"""
WORKERS = """\
from aot_compiler.backends.cpu import CpuBackend
from artifacts.command_line import run

def compile_two():
    with CpuBackend("native", workers=2) as backend:
        futures = [backend.submit(b"no module", 1, "an entry") for _ in range(2)]
        for future in futures:
            backend.result(future, "an entry")

if __name__ == "__main__":
    run(compile_two)
"""


def group_of(pid: int) -> list[str]:
    """Command lines of the processes of a group. One that has ended and waits to be reaped has none."""
    lines = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and os.getpgid(int(folder.name)) == pid:
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return [line for line in lines if line]


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.005)


@contextmanager
def started(*arguments: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Python in a process group of its own, none of whose processes outlives the test."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A job that was put in the background ignores SIGINT, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        if group_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("delay", [0, 0.02, 0.1])
def test_ctrl_c_while_workers_start(tmp_path: Path, delay: float) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(WORKERS)
    with started(script, log=log) as process:
        wait_until(lambda: any("spawn_main" in line for line in group_of(process.pid)), seconds=30)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        wait_until(lambda: not group_of(process.pid), seconds=10)
        assert log.read_text() == f"{INTERRUPTED}\n"


def test_ctrl_c_while_workers_compile(tmp_path: Path, tiny_checkpoint: Path) -> None:
    config, output, log = tmp_path / "model.yaml", tmp_path / "out", tmp_path / "log"
    config.write_text(YAML.format(source=tiny_checkpoint, output=output))
    with started("-m", "aot_compiler.cli", "--config", config, "--workers", 2, log=log) as process:
        wait_until(lambda: process.poll() is not None or "lower 2/40 " in log.read_text(), seconds=60)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        wait_until(lambda: not group_of(process.pid), seconds=10)
    first, *stages, last = log.read_text().splitlines()
    assert first.startswith(f"building {output} from {tiny_checkpoint}: 40 entries, float32, for cpu")
    assert all(line.startswith(("trace ", "lower ", "compile ", "weights: ")) for line in stages)
    assert last == INTERRUPTED
    with pytest.raises((UnfinishedArtifactError, ArtifactNotFoundError)):
        open_artifact(output)
