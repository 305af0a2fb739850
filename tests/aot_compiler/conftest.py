"""Fixtures of the tests of the configuration."""

from pathlib import Path

import pytest

from aot_compiler.config_file import load_config
from artifacts.errors import ConfigError
from tests.aot_compiler.small_config import Faults


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """Loads a text with overrides, and returns the lines of the error with the file's name in place of its path."""

    def load(text: str | bytes, *overrides: str) -> list[str]:
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        lines = str(caught.value).replace(str(path), "c.yaml").split("\n")
        assert len(lines) == len(caught.value.faults)
        return lines

    return load
