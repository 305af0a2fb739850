import contextlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
import typer

from artifacts import errors
from artifacts.command_line import Interrupted, run
from artifacts.errors import AotError, ConfigError, CorruptArtifactError, PromptError, ToolMissingError
from tests.artifacts.places import ROOT

INTERRUPTED = "interrupted; the same command starts again\n"


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
    assert capsys.readouterr() == ("", INTERRUPTED)


def press_ctrl_c(*, soon: float = 0.0) -> None:
    timer = threading.Timer(soon, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()


@pytest.fixture
def _own_interrupts() -> Iterator[None]:
    """Python's own handler before and after: pytest, or an earlier interrupt, may have left another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_late() -> None:
    press_ctrl_c(soon=0.05)
    time.sleep(20)


def interrupted_where_nothing_can_be_raised() -> None:
    """As in a callback of the garbage collector: Python drops what is raised there, and goes on."""
    target = type("Target", (), {})()
    reference = weakref.ref(target, lambda _: signal.raise_signal(signal.SIGINT))
    del target
    assert reference() is None
    time.sleep(20)


def interrupted_in_a_library_that_tells_it_otherwise() -> None:
    try:
        interrupted_late()
    except Interrupted:
        raise RuntimeError("the stream was cut") from None


def interrupted_in_a_library_that_keeps_it_to_itself() -> None:
    with contextlib.suppress(Interrupted):
        interrupted_late()


@pytest.mark.usefixtures("_own_interrupts")
@pytest.mark.parametrize(
    "command",
    [
        interrupted_late,
        interrupted_where_nothing_can_be_raised,
        interrupted_in_a_library_that_tells_it_otherwise,
        interrupted_in_a_library_that_keeps_it_to_itself,
    ],
)
def test_ctrl_c_is_one_line_wherever_it_comes(command: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert ending(command) == 130
    assert capsys.readouterr() == ("", INTERRUPTED)
    assert time.monotonic() - started < 10


@pytest.mark.usefixtures("_own_interrupts")
def test_ctrl_c_is_python_s_own_again_after_a_command() -> None:
    hook = sys.unraisablehook
    ending(lambda: None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.unraisablehook is hook


def test_a_command_that_ignores_ctrl_c_still_does() -> None:
    """A shell starts a command of a script's background with SIGINT ignored."""
    script = "import signal\nfrom artifacts.command_line import run\nrun(lambda: signal.raise_signal(signal.SIGINT))"
    command = f"trap '' INT; {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("argument", "code"), [("fine", 0), ("mistake", 2), ("interrupt", 130), ("exit", 7), ("--unknown", 2)]
)
def test_under_typer(
    argument: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (capsys.readouterr().err == INTERRUPTED) == (argument == "interrupt")


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
