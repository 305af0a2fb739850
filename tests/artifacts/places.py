"""Places that refuse: tests run as root too, whom permission bits do not stop."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
"""Of the repository: where processes of the tests find their modules."""
NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root's powers over files, if this process has them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that all users can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o755)
        yield folder


def run_python_in_mount(mount: str, script: str, *arguments: object) -> str:
    """Run a script after a shell command that mounts something, in a mount namespace of their own.

    Returns:
        Standard output. The test is skipped where the system does not let us mount.
    """
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("this system does not allow mounts in a user namespace")
    command = f'{mount} && exec "$PYTHON" -c "$SCRIPT" "$@"'
    environment = {**os.environ, "PYTHON": sys.executable, "SCRIPT": script, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*unshare, "sh", "-c", command, "sh", *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
