import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from artifacts.errors import (
    ArtifactNotFoundError,
    CheckpointError,
    CorruptArtifactError,
    OutputFolderError,
    UnfinishedArtifactError,
)
from artifacts.folder import BUILD_MARKER, open_artifact
from artifacts.manifest import FileRecord, Manifest
from artifacts.writer import ArtifactWriter, check_output
from tests.artifacts.example import add_example, build_example, tree
from tests.artifacts.places import ROOT, public_folder, run_python_in_mount, unprivileged

RULES = "; expected a new or empty folder, or an earlier artifact; choose another output"
CANNOT_WRITE = (
    "; expected a folder that can be written, with room for the artifact; free the way there, or choose another output"
)


def revision_of(folder: Path) -> int:
    """Which revision of the example a folder holds; every byte of it is checked."""
    artifact = open_artifact(folder, verify=True)
    revision = int(artifact.path("config.yaml").read_bytes()[-2:])
    expected = {0: 6, 1: 5}[revision]  # revision 1 is built without a chat template
    assert len(artifact.manifest.files) == expected
    return revision


def refusal(output: Path) -> str:
    with pytest.raises(OutputFolderError) as caught:
        build_example(output)
    return str(caught.value)


# A build that ends


def test_a_new_folder(tmp_path: Path) -> None:
    output = tmp_path / "compiled" / "a"
    manifest = build_example(output)
    assert sorted(tree(output)) == sorted([*manifest.files, "manifest.json"])
    assert revision_of(output) == 0


def test_an_empty_folder_and_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    build_example(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert revision_of(tmp_path / "real") == 0


def test_the_same_build_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    build_example(tmp_path / "a")
    before = tree(tmp_path / "a")
    inodes = {path: (tmp_path / "a" / path).stat().st_ino for path in before if path.startswith(("graphs", "programs"))}
    build_example(tmp_path / "a")
    assert tree(tmp_path / "a") == before
    assert inodes == {path: (tmp_path / "a" / path).stat().st_ino for path in inodes}  # kept, not written again
    build_example(tmp_path / "b")
    assert tree(tmp_path / "b") == before


def test_a_rebuild_removes_what_is_stale_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "a"
    build_example(output)
    before = tree(output)
    (output / "programs" / "trn2").mkdir()
    stale = {
        f"graphs/{'0' * 64}.hlo.pb",  # of a build that was killed, and that no manifest lists
        f"programs/trn2/{'0' * 64}.neff",
        "weights/.{sha256}.safetensors.aot-partial",
        ".config.yaml.aot-partial",
        ".old.aot-partial",
    }
    own = {
        "README.md",
        "notes/x",
        ".hidden",
        "weights/README.md",
        "tokenizer/mine.json",
        "graphs/deep/x",
        "a.aot-partial",
    }
    for relative in stale | own:
        (output / relative).parent.mkdir(exist_ok=True)
        (output / relative).write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'0' * 64}.x").touch()
    (output / "graphs" / "link").symlink_to(outside)

    manifest = build_example(output, revision=1, chat_template=False)

    assert set(tree(output)) == {*manifest.files, "manifest.json", *own}
    assert not set(before) & set(manifest.files) - {"config.yaml", "tokenizer/tokenizer.json"}
    assert not (output / "programs" / "trn2").exists()
    assert len(list(outside.iterdir())) == 1


def test_an_earlier_manifest_cannot_have_other_files_removed(tmp_path: Path) -> None:
    output = tmp_path / "a"
    build_example(output)
    (tmp_path / "outside").touch()
    (output / "README.md").touch()
    files = '{"../outside": 1, "README.md": 1, "tokenizer/tokenizer.json": 1}'
    (output / "manifest.json").write_text(f'{{"format_version": 9, "self_digest": "", "files": {files}}}')
    build_example(output, revision=1, chat_template=False)
    assert (tmp_path / "outside").exists()
    assert (output / "README.md").exists()
    assert (output / "tokenizer" / "chat_template.jinja").exists()  # that manifest did not list it
    assert open_artifact(output).path("config.yaml").read_bytes() == b"output: revision-1\n"


def test_every_file_is_on_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "a"
    build_example(output)
    events: list[tuple[str, str]] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def name(path: Any) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path, output)

    def recorded(kind: str, call: Callable[..., None]) -> Callable[..., None]:
        def record(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            events.append((kind, name(arguments[-1])))

        return record

    monkeypatch.setattr(os, "fsync", recorded("fsync", fsync))
    monkeypatch.setattr(os, "replace", recorded("rename", replace))
    monkeypatch.setattr(os, "unlink", recorded("remove", unlink))
    manifest = build_example(output, revision=1, chat_template=False)

    commit = events.index(("rename", "manifest.json"))
    for relative in manifest.files:
        parent, base = os.path.split(relative)
        temporary = f".{base}.aot-partial" if parent != "weights" else ".{sha256}.safetensors.aot-partial"
        written = events.index(("fsync", os.path.join(parent, temporary)))
        renamed = events.index(("rename", relative))
        named = [i for i, event in enumerate(events) if event == ("fsync", parent or ".")]
        assert written < renamed < commit
        assert any(renamed < i < commit for i in named), relative
    assert events.index(("fsync", ".manifest.json.aot-partial")) < commit
    assert events[commit + 1] == ("fsync", ".")
    assert all(i > commit + 1 for i, (kind, _) in enumerate(events) if kind == "remove")
    assert events[-1] == ("remove", BUILD_MARKER)
    first_moved = min(events.index(("rename", path)) for path in ("config.yaml", "tokenizer/tokenizer.json"))
    assert events.index(("fsync", BUILD_MARKER)) < events.index(("fsync", ".")) < first_moved
    moved = [path for kind, path in events if kind == "rename"]
    assert set(moved[-3:-1]) == {"config.yaml", "tokenizer/tokenizer.json"}
    assert moved[-1] == "manifest.json"


def test_a_manifest_that_contradicts_itself_is_not_committed(tmp_path: Path) -> None:
    build_example(tmp_path / "a")
    with ArtifactWriter(tmp_path / "a") as writer:
        manifest = add_example(writer, revision=1, chat_template=False)
        with pytest.raises(CorruptArtifactError, match=r"parameter model.* has no weight"):
            writer.commit(msgspec.structs.replace(manifest, weights={}))
        with pytest.raises(CorruptArtifactError, match="Expected `int` >= 1"):
            writer.commit(
                msgspec.structs.replace(manifest, model=msgspec.structs.replace(manifest.model, vocab_size=0))
            )
        files = {path: record for path, record in manifest.files.items() if path != "config.yaml"}
        with pytest.raises(ValueError, match="does not list the files that were written"):
            writer.commit(msgspec.structs.replace(manifest, files=files))
    assert revision_of(tmp_path / "a") == 0


# A build that is stopped


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Path, int]]:
    """Folders of builds that were stopped, each one change later than the one before."""
    base = tmp_path_factory.mktemp("stopped")
    build_example(base / "earlier")
    done: dict[tuple[str, bool], tuple[Path, int]] = {}

    def run(how: str, rebuild: bool) -> tuple[Path, int]:
        if (how, rebuild) not in done:
            place = base / f"{how}-{rebuild}"
            place.mkdir()
            start = str(base / "earlier") if rebuild else "-"
            command = [sys.executable, "-m", "tests.artifacts.stopped_builds", how, str(place), start]
            steps = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
            done[how, rebuild] = place, int(steps)
        return done[how, rebuild]

    return run


def state_of(folder: Path) -> str:
    try:
        return f"revision {revision_of(folder)}"
    except UnfinishedArtifactError:
        return "unfinished"
    except ArtifactNotFoundError:
        assert not folder.exists() or not any(folder.iterdir())
        return "nothing"


@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_first_build_stopped_anywhere(stopped: Callable[[str, bool], tuple[Path, int]], how: str) -> None:
    base, steps = stopped(how, False)
    states = [state_of(base / str(step)) for step in range(1, steps + 1)]
    order = ["nothing", "unfinished", "revision 1"]
    assert states == sorted(states, key=order.index)
    # what is left to do after the manifest: the marker
    assert states.count("revision 1") == 1
    assert states.count("unfinished") >= 10


@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_rebuild_stopped_anywhere(stopped: Callable[[str, bool], tuple[Path, int]], how: str) -> None:
    base, steps = stopped(how, True)
    states = [state_of(base / str(step)) for step in range(1, steps + 1)]
    order = ["revision 0", "unfinished", "revision 1"]
    assert states == sorted(states, key=order.index)
    # the earlier artifact is lost from the first rename of config.yaml and tokenizer.json to that of the manifest
    assert states.count("unfinished") == 2
    assert states.count("revision 0") >= 10
    # then come four stale files, and the marker
    assert states.count("revision 1") == 5


@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("rebuild", [False, True])
def test_another_build_completes_it(
    stopped: Callable[[str, bool], tuple[Path, int]], how: str, rebuild: bool, tmp_path: Path
) -> None:
    base, steps = stopped(how, rebuild)
    build_example(tmp_path / "clean", revision=1, chat_template=False)
    whole = tree(tmp_path / "clean")
    for step in range(1, steps + 1):
        folder = base / str(step)
        build_example(folder, revision=1, chat_template=False)
        assert tree(folder) == whole, step


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_full_disk_is_told_in_one_line(stopped: Callable[[str, bool], tuple[Path, int]], rebuild: bool) -> None:
    base, steps = stopped("full", rebuild)
    for step in range(1, steps + 1):
        assert (base / f"{step}.error").read_text() == f"{base / str(step)}: No space left on device{CANNOT_WRITE}"


def test_a_failed_build_leaves_no_temporary_file(tmp_path: Path) -> None:
    def half(out: BinaryIO) -> FileRecord:
        out.write(b"half")
        raise KeyboardInterrupt

    with ArtifactWriter(tmp_path / "a") as writer:
        with pytest.raises(KeyboardInterrupt):
            writer.add_stream("weights/{sha256}.safetensors", half)
        writer.add_bytes("config.yaml", b"")
    assert set(tree(tmp_path / "a")) == {BUILD_MARKER}
    with pytest.raises(UnfinishedArtifactError):
        open_artifact(tmp_path / "a")


def test_a_build_that_fails_before_it_writes_leaves_the_place_as_it_was(tmp_path: Path) -> None:
    def fail(output: Path) -> None:
        with pytest.raises(KeyboardInterrupt), ArtifactWriter(output):
            raise KeyboardInterrupt

    fail(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    fail(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    build_example(tmp_path / "a")
    before = tree(tmp_path / "a")
    fail(tmp_path / "a")
    assert tree(tmp_path / "a") == before
    (tmp_path / "a" / "tokenizer").rename(tmp_path / "outside")
    (tmp_path / "a" / "tokenizer").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "empty").mkdir()
    fail(tmp_path / "a")
    assert (tmp_path / "outside" / "empty").exists()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / BUILD_MARKER).touch()
    fail(tmp_path / "killed")
    assert set(tree(tmp_path / "killed")) == {BUILD_MARKER}


def test_what_a_callback_raises_is_its_own(tmp_path: Path) -> None:
    """A checkpoint that cannot be read is no fault of the output."""

    def unreadable(out: BinaryIO) -> FileRecord:
        raise OSError(errno.EIO, "Input/output error", "model.safetensors")

    def corrupt(out: BinaryIO) -> FileRecord:
        raise CheckpointError(found="a", expected="b", action="c")

    with ArtifactWriter(tmp_path / "a") as writer:
        with pytest.raises(OSError, match=r"model\.safetensors"):
            writer.add_stream("weights/{sha256}.safetensors", unreadable)
        with pytest.raises(CheckpointError):
            writer.add_stream("weights/{sha256}.safetensors", corrupt)


# A place that refuses


def test_what_is_no_artifact_is_refused_and_untouched(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "manifest.json").write_text('{"name": "app", "manifest_version": 3, "files": {"index.html": {}}}')
    (app / "graphs").mkdir()
    (app / "graphs" / f"{'0' * 64}.hlo.pb").touch()
    before = tree(app)
    assert refusal(app) == f"{app} is not empty and not an artifact{RULES}"
    assert tree(app) == before
    (app / "manifest.json").unlink()
    assert refusal(app) == f"{app} is not empty and not an artifact{RULES}"
    (tmp_path / "linked").symlink_to("app")
    assert refusal(tmp_path / "linked") == f"{tmp_path / 'linked'} is not empty and not an artifact{RULES}"
    assert list(tree(app)) == [f"graphs/{'0' * 64}.hlo.pb"]


def test_a_damaged_artifact_is_not_known_as_one(tmp_path: Path) -> None:
    build_example(tmp_path)
    os.truncate(tmp_path / "manifest.json", 100)
    assert refusal(tmp_path) == f"{tmp_path} is not empty and not an artifact{RULES}"


def test_a_file_and_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    assert refusal(tmp_path / "f") == f"{tmp_path / 'f'} is a file{RULES}"
    assert (tmp_path / "f").read_text() == "mine"
    (tmp_path / "l").symlink_to("nowhere")
    assert refusal(tmp_path / "l") == f"{tmp_path / 'l'} is a link to nothing{RULES}"
    assert not (tmp_path / "nowhere").exists()


def test_check_output_looks_and_does_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputFolderError):
        check_output(tmp_path.parent)


@pytest.mark.parametrize(
    ("output", "reason"),
    [("f/a", "Not a directory"), ("f/a/b", "Not a directory"), ("x" * 300, "File name too long")],
)
def test_a_path_that_the_system_refuses(tmp_path: Path, output: str, reason: str) -> None:
    (tmp_path / "f").touch()
    assert refusal(tmp_path / output) == f"{tmp_path / output}: {reason}{CANNOT_WRITE}"


def test_a_place_where_this_user_may_not_write() -> None:
    with public_folder() as place:
        build_example(place / "earlier")
        before = tree(place)
        (place / "earlier").chmod(0o555)
        place.chmod(0o555)
        with unprivileged():
            for output in (place / "new", place / "earlier"):
                assert refusal(output) == f"{output}: Permission denied{CANNOT_WRITE}"
        assert tree(place) == before


def test_a_folder_that_this_user_may_not_look_into() -> None:
    with public_folder() as place:
        (place / "a").mkdir(mode=0)
        with unprivileged():
            assert refusal(place / "a") == f"{place / 'a'}: Permission denied{CANNOT_WRITE}"


BUILD = """if True:
    import sys
    from pathlib import Path
    from artifacts.errors import OutputFolderError
    from tests.artifacts.example import build_example
    try:
        build_example(Path(sys.argv[2] if len(sys.argv) > 2 else sys.argv[1]), revision=1, chat_template=False)
        print("built")
    except OutputFolderError as error:
        print(error)
"""


def test_a_read_only_file_system(tmp_path: Path) -> None:
    build_example(tmp_path / "a")
    before = tree(tmp_path / "a")
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
    for output in (tmp_path / "a", tmp_path / "new"):
        answer = run_python_in_mount(mount, BUILD, tmp_path, output)
        assert answer == f"{output}: Read-only file system{CANNOT_WRITE}\n"
    assert tree(tmp_path / "a") == before
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """As many pages as hold a part of the artifact: the marker, folders and files of a tmpfs take one each."""
    mount = 'mount -t tmpfs -o size=12k none "$1"'
    assert run_python_in_mount(mount, BUILD, tmp_path) == f"{tmp_path}: No space left on device{CANNOT_WRITE}\n"


def test_a_write_that_fails_inside_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full gives what a full disk gives, wherever the tests run."""

    def write(out: BinaryIO) -> FileRecord:
        os.dup2(full.fileno(), out.fileno())
        out.write(bytes(2**20))
        raise AssertionError

    with open("/dev/full", "wb") as full, ArtifactWriter(tmp_path / "a") as writer:
        with pytest.raises(OutputFolderError) as caught:
            writer.add_stream("weights/{sha256}.safetensors", write)
        assert str(caught.value) == f"{tmp_path / 'a'}: No space left on device{CANNOT_WRITE}"


@pytest.mark.parametrize("folder", ["graphs", "programs", "tokenizer"])
def test_a_folder_of_the_artifact_that_is_a_link_out(tmp_path: Path, folder: str) -> None:
    build_example(tmp_path / "a")
    (tmp_path / "a" / folder).rename(tmp_path / "outside")
    (tmp_path / "a" / folder).symlink_to(tmp_path / "outside")
    before = tree(tmp_path / "outside")
    with pytest.raises(OutputFolderError) as caught:
        build_example(tmp_path / "a", revision=1)
    below = "programs/cpu" if folder == "programs" else folder
    assert str(caught.value) == (
        f"{tmp_path / 'a' / below} is a link that leaves the output; expected folders of an artifact inside it, so "
        "that it can be moved; remove the link, or choose another output"
    )
    assert tree(tmp_path / "outside") == before


# Two builds at once


def busy(output: Path) -> str:
    return (
        f"{output} is being built by another process; expected one build of a folder at a time; "
        "wait for it, or choose another output"
    )


def test_two_builds_of_one_folder(tmp_path: Path) -> None:
    output = tmp_path / "a"
    with ArtifactWriter(output) as writer:
        assert refusal(output) == busy(output)
        (tmp_path / "link").symlink_to("a")
        assert refusal(tmp_path / "link") == busy(tmp_path / "link")
        writer.commit(add_example(writer, revision=1, chat_template=False))
    assert revision_of(output) == 1
    build_example(output)
    assert revision_of(output) == 0


def test_a_killed_process_gives_up_the_folder(tmp_path: Path) -> None:
    output = tmp_path / "a"
    build_example(output)
    script = """if True:
        import sys, time
        from pathlib import Path
        from artifacts.writer import ArtifactWriter
        from tests.artifacts.example import add_example
        with ArtifactWriter(Path(sys.argv[1])) as writer:
            add_example(writer, revision=1)
            print("written", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", script, str(output)], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        assert refusal(output) == busy(output)
        assert revision_of(output) == 0
        process.send_signal(signal.SIGKILL)
    assert revision_of(output) == 0
    build_example(output, revision=1, chat_template=False)
    assert revision_of(output) == 1
    assert set(tree(output)) == {*open_artifact(output).manifest.files, "manifest.json"}


def test_the_lock_is_that_of_the_marker_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build may end between opening the marker and locking it: the file that was opened is then gone."""
    output = tmp_path / "a"
    real = fcntl.flock
    calls = 0

    def flock(file: BinaryIO, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (output / BUILD_MARKER).unlink()
        if calls == 2:
            (output / BUILD_MARKER).unlink()
            (output / BUILD_MARKER).touch()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with ArtifactWriter(output):
        assert calls == 3
        assert refusal(output) == busy(output)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: BinaryIO, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert refusal(tmp_path / "a") == f"{tmp_path / 'a'}: No locks available{CANNOT_WRITE}"


def test_an_ended_build_takes_nothing_from_the_next(tmp_path: Path) -> None:
    """Between commit and the end of its block, another build may already be writing."""
    output = tmp_path / "a"
    with ArtifactWriter(output) as first:
        first.commit(add_example(first, revision=1, chat_template=False))
        second = ArtifactWriter(output)
        second.__enter__()
        manifest: Manifest = add_example(second)
    second.commit(manifest)
    second.__exit__(None, None, None)
    assert revision_of(output) == 0


def test_a_copy_of_an_artifact_can_be_rebuilt(tmp_path: Path) -> None:
    build_example(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    build_example(tmp_path / "b", revision=1, chat_template=False)
    assert (revision_of(tmp_path / "a"), revision_of(tmp_path / "b")) == (0, 1)
