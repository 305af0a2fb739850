import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest
import typer

from artifacts import errors
from artifacts.command_line import run
from artifacts.errors import AotError, ConfigError, CorruptArtifactError, PromptError, ToolMissingError
from tests.artifacts.places import ROOT


def ending(command: Callable[[], object]) -> object:
    with pytest.raises(SystemExit) as caught:
        run(command)
    return caught.value.code


def fail(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptArtifactError(found="a.bin is short", expected="9 bytes", action="fetch it"), 1),
        (PromptError(found="a.bin is short", expected="9 bytes", action="fetch it"), 2),
        (ToolMissingError(found="a.bin is short", expected="9 bytes", action="fetch it"), 3),
    ],
)
def test_a_users_mistake_is_one_line(error: AotError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(fail(error)) == code
    assert capsys.readouterr() == ("", "error: a.bin is short; expected 9 bytes; fetch it\n")


def test_all_faults_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    faults = [ConfigError(found=name, expected="b", action="c") for name in ("x", "y")]
    assert ending(fail(ConfigError(faults))) == 2
    assert capsys.readouterr().err == "error: x; expected b; c\nerror: y; expected b; c\n"


def test_success_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(lambda: "a result") == 0
    assert capsys.readouterr() == ("", "")


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("argument", "code"), [("fine", 0), ("mistake", 2), ("interrupt", 130), ("exit", 7), ("--unknown", 2)]
)
def test_under_typer(argument: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command(what: str) -> None:
        if what == "mistake":
            raise PromptError(found="a", expected="b", action="c")
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "exit":
            raise typer.Exit(7)

    monkeypatch.setattr(sys, "argv", ["command", argument])
    assert ending(app) == code


@pytest.mark.parametrize("lines", [1, 10_000], ids=["a little", "more than a pipe holds"])
def test_a_reader_that_went_away(lines: int) -> None:
    script = f"""if True:
        from artifacts.command_line import run
        def command():
            for i in range({lines}):
                print("line", i)
        run(command)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_tree_of_errors_is_the_one_that_is_documented() -> None:
    documented: dict[str, str] = {}
    above: list[str] = []
    assert errors.__doc__
    for line in errors.__doc__.splitlines():
        if found := re.match(r"    ([\u2502 ]*)(?:[\u251c\u2514]\u2500\u2500 )?(\w+Error)\b", line):
            depth = len(found[1]) // 4 + ("\u2500" in line)
            documented[found[2]] = above[depth - 1] if depth else "Exception"
            above[depth:] = [found[2]]
    classes = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, AotError) and value.__base__
    }
    assert documented == classes
    assert all(value.__doc__ for value in vars(errors).values() if inspect.isclass(value))


def test_every_error_tells_what_was_found_what_is_expected_and_what_to_do() -> None:
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, AotError):
            error = value(found="a", expected="b", action="c")
            assert str(error) == "a; expected b; c"
            assert error.exit_code in (1, 2, 3)
