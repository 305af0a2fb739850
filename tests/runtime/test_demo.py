import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.demo import app
from runtime.llm import LLM

ARGUMENTS = ["--question", "Why?", "--max-tokens", "6"]


def test_demo_shows_three_equal_answers(tiny_artifact: Path):
    result = CliRunner().invoke(app, [str(tiny_artifact), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    rows = re.findall(r"answer from (\w+)  (\d+) token ids, (\d+) embeddings", result.output)
    length = int(rows[0][1])
    assert rows == [
        ("text", str(length), "0"),
        ("embeddings", "0", str(length)),
        ("both", str(length - length // 2), str(length // 2)),
    ]
    assert length > 4
    for stage in ("manifest", "client", "weights", "caches", r"\d programs"):
        assert re.search(rf"^ +\d+\.\d ms  {stage}", result.output, re.MULTILINE), stage
    assert "\nequal: 3 of 3\n" in result.output
    assert result.output.endswith("\ncompilations: 0\n")


def test_demo_fails_where_answers_differ(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch):
    right = LLM.embed
    monkeypatch.setattr(LLM, "embed", lambda self, ids: -right(self, ids))
    result = CliRunner().invoke(app, [str(tiny_artifact), *ARGUMENTS])
    assert result.exit_code == 1
    assert "\nequal: 1 of 3\n" in result.output


def test_demo_fails_where_something_was_compiled(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch):
    right = LLM.stats
    monkeypatch.setattr(LLM, "stats", property(lambda self: {**right.__get__(self), "compilations": 1}))
    result = CliRunner().invoke(app, [str(tiny_artifact), *ARGUMENTS])
    assert result.exit_code == 1
    assert "\nequal: 3 of 3\n" in result.output
    assert result.output.endswith("\ncompilations: 1\n")
