import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artifacts.errors import (
    ArtifactNotFoundError,
    CorruptArtifactError,
    FormatVersionError,
    LayoutNotFoundError,
    UnfinishedArtifactError,
)
from artifacts.folder import BUILD_MARKER, Artifact, file_record, is_manifest, open_artifact
from artifacts.manifest import FileRecord, Manifest, decode_manifest, encode_manifest
from tests.artifacts.example import build_example, tree
from tests.artifacts.places import public_folder, run_python_in_mount, unprivileged

OWNED = ("graphs/", "programs/", "weights/", "tokenizer/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "a"
    build_example(folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the example, to be spoilt."""
    return Path(shutil.copytree(built, tmp_path / "a"))


def listed(folder: Path) -> list[str]:
    return sorted(json.loads((folder / "manifest.json").read_bytes())["files"])


def file_in(folder: Path, start: str) -> str:
    (found,) = (relative for relative in listed(folder) if relative.startswith(start))
    return found


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Put another manifest in place, sound in itself."""
    path = folder / "manifest.json"
    path.write_bytes(encode_manifest(change(decode_manifest(path.read_bytes(), ""))))


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(CorruptArtifactError) as caught:
        open_artifact(folder, **options)
    assert type(caught.value) is CorruptArtifactError
    return str(caught.value)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened from here on."""
    names: list[str] = []
    real = io.open

    def record(file: Any, *arguments: Any, **options: Any) -> Any:
        names.append(Path(file).name)
        return real(file, *arguments, **options)

    monkeypatch.setattr(io, "open", record)
    return names


def test_a_whole_artifact(folder: Path, opened: list[str]) -> None:
    artifact = open_artifact(folder)
    assert artifact.root == folder
    assert opened == ["manifest.json"]
    assert artifact.manifest == decode_manifest((folder / "manifest.json").read_bytes(), "")
    assert [artifact.path(relative).read_bytes() for relative in listed(folder)] == [
        (folder / relative).read_bytes() for relative in listed(folder)
    ]
    assert open_artifact(folder, verify=True) == artifact


def test_loading_changes_nothing(folder: Path) -> None:
    before = {path: path.lstat() for path in folder.rglob("*")}
    open_artifact(folder, verify=True)
    after = {path: path.lstat() for path in folder.rglob("*")}
    assert {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in after.items()} == {
        path: (stat.st_mtime_ns, stat.st_ino) for path, stat in before.items()
    }


# Where the artifact may be


def test_moved_copied_and_linked(folder: Path, tmp_path: Path) -> None:
    manifest = open_artifact(folder).manifest
    (tmp_path / "link").symlink_to("a")
    assert open_artifact(tmp_path / "link", verify=True) == Artifact(root=folder, manifest=manifest)
    shutil.copytree(folder, tmp_path / "copy")
    assert open_artifact(str(tmp_path / "copy"), verify=True).manifest == manifest
    folder.rename(tmp_path / "moved")
    assert open_artifact(tmp_path / "moved", verify=True).manifest == manifest
    assert open_artifact(tmp_path / "copy" / ".." / "moved").root == tmp_path / "moved"


def test_an_open_artifact_stays_where_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_example(tmp_path / "b", revision=1)
    link = tmp_path / "current"
    link.symlink_to("a")
    monkeypatch.chdir(tmp_path)
    artifact = open_artifact("current")
    monkeypatch.chdir("/")
    link.unlink()
    link.symlink_to("b")
    assert artifact.path("config.yaml").read_bytes() == b"output: revision-0\n"
    artifact.check_digests()


def test_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert open_artifact(".").root == folder
    (folder / "config.yaml").unlink()
    assert refusal(Path(".")).startswith(f"{folder}: config.yaml is missing; ")


def test_from_a_place_that_this_user_can_only_read() -> None:
    with public_folder() as place:
        build_example(place / "a")
        for path in (place / "a").rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        (place / "a").chmod(0o555)
        with unprivileged():
            with pytest.raises(PermissionError):
                (place / "a" / "x").touch()
            assert open_artifact(place / "a", verify=True).root == place / "a"


def test_from_a_read_only_file_system(folder: Path) -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from artifacts.folder import open_artifact
        try:
            Path(sys.argv[1], "x").touch()
        except OSError as error:
            print(error.strerror)
        print(len(open_artifact(sys.argv[1], verify=True).manifest.files))
    """
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
    assert run_python_in_mount(mount, script, folder) == "Read-only file system\n6\n"


# What is not an artifact


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.touch(), "is not a folder"),
        (lambda path: path.mkdir(), "has no manifest"),
        (lambda path: (path / "manifest.json").mkdir(parents=True), "has no manifest"),
        (lambda path: path.mkdir() or os.mkfifo(path / "manifest.json"), "has no manifest"),  # type: ignore[func-returns-value]
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
    ],
)
def test_not_an_artifact(tmp_path: Path, make: Callable[[Path], None], state: str) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(ArtifactNotFoundError) as caught:
        open_artifact(path)
    assert str(caught.value) == (
        f"{path} {state}; expected an artifact: a folder with manifest.json; build one with aot-compile --config FILE"
    )


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(ArtifactNotFoundError) as caught:
        open_artifact(path)
    assert str(caught.value) == (
        f"{path} cannot be read (File name too long); expected an artifact: a folder with manifest.json; "
        "check the path and its permissions"
    )


def test_a_manifest_that_this_user_may_not_read() -> None:
    with public_folder() as place:
        build_example(place / "a")
        (place / "a" / "manifest.json").chmod(0)
        with unprivileged(), pytest.raises(ArtifactNotFoundError) as caught:
            open_artifact(place / "a")
        assert caught.value.found == f"{place / 'a'} cannot be read (Permission denied)"


def test_is_manifest(folder: Path, tmp_path: Path) -> None:
    assert is_manifest(folder / "manifest.json")
    for content, expected in [
        (b'{"format_version": 7, "self_digest": "", "later": true}', True),
        (b'{"format_version": 7}', False),
        (b'{"name": "app", "manifest_version": 3}', False),
        (b"", False),
        ((folder / "manifest.json").read_bytes()[:-9], False),
    ]:
        (tmp_path / "m").write_bytes(content)
        assert is_manifest(tmp_path / "m") is expected
    assert not is_manifest(tmp_path)
    assert not is_manifest(tmp_path / "absent")
    os.truncate(tmp_path / "m", 200 * 2**20)
    assert not is_manifest(tmp_path / "m")


# Builds under way


def test_an_unfinished_build(tmp_path: Path) -> None:
    (tmp_path / BUILD_MARKER).touch()
    with pytest.raises(UnfinishedArtifactError) as caught:
        open_artifact(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds an unfinished build; expected manifest.json; run the same aot-compile again"
    )


@pytest.mark.parametrize("relative", ["config.yaml", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("content", [b"x", None], ids=["another size", "the same size"])
def test_a_build_killed_between_a_file_and_its_manifest(folder: Path, relative: str, content: bytes | None) -> None:
    (folder / BUILD_MARKER).touch()
    assert open_artifact(folder).root == folder
    original = (folder / relative).read_bytes()
    (folder / relative).write_bytes(content or original.replace(b"0", b"1"))
    with pytest.raises(UnfinishedArtifactError):
        open_artifact(folder)
    (folder / relative).write_bytes(original)
    assert open_artifact(folder, verify=True).root == folder


def test_a_build_under_way_may_leave_files(folder: Path) -> None:
    (folder / BUILD_MARKER).touch()
    (folder / "graphs" / "of the next build").touch()
    assert open_artifact(folder, verify=True).root == folder


def test_a_build_under_way_excuses_no_escape(folder: Path, tmp_path: Path) -> None:
    (folder / BUILD_MARKER).touch()
    (folder / "config.yaml").rename(tmp_path / "outside")
    (folder / "config.yaml").symlink_to(tmp_path / "outside")
    assert "path 'config.yaml' leaves the folder" in refusal(folder)


# Files


@pytest.mark.parametrize("start", ["config.yaml", "tokenizer/tokenizer.json", *OWNED[:3]])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_missing_or_has_another_size(folder: Path, start: str, verify: bool) -> None:
    relative = file_in(folder, start)
    path = folder / relative
    content = path.read_bytes()
    rest = f"; expected {len(content)} bytes; restore the file or rebuild the artifact"
    path.write_bytes(content[:-1])
    assert refusal(folder, verify=verify) == f"{folder}: {relative} has {len(content) - 1} bytes{rest}"
    path.write_bytes(content + b"\0")
    assert refusal(folder, verify=verify) == f"{folder}: {relative} has {len(content) + 1} bytes{rest}"
    path.unlink()
    assert refusal(folder, verify=verify) == f"{folder}: {relative} is missing{rest}"
    path.mkdir()
    assert refusal(folder, verify=verify) == f"{folder}: {relative} is missing{rest}"
    path.rmdir()
    os.mkfifo(path)
    assert refusal(folder, verify=verify) == f"{folder}: {relative} is missing{rest}"
    path.unlink()
    path.symlink_to(path.name)
    assert refusal(folder, verify=verify) == f"{folder}: {relative} is missing{rest}"


def test_every_flipped_byte_is_found_by_verify(folder: Path) -> None:
    for relative in listed(folder):
        path = folder / relative
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 8)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            assert open_artifact(folder).root == folder  # sizes alone do not tell
            assert refusal(folder, verify=True) == (
                f"{folder}: {relative} has SHA-256 {hashlib.sha256(damaged).hexdigest()[:16]}...; "
                f"expected {hashlib.sha256(content).hexdigest()[:16]}...; restore the file or rebuild the artifact"
            )
        path.write_bytes(content)
    assert open_artifact(folder, verify=True).root == folder


def test_weights_of_another_revision(folder: Path, tmp_path: Path) -> None:
    build_example(tmp_path / "b", revision=1)
    relative = file_in(folder, "weights/")
    shutil.copy(tmp_path / "b" / file_in(tmp_path / "b", "weights/"), folder / relative)
    assert open_artifact(folder).root == folder
    assert f"{relative} has SHA-256" in refusal(folder, verify=True)


def test_the_first_of_many_damaged_files_is_named(folder: Path) -> None:
    for relative in listed(folder):
        (folder / relative).write_bytes(bytes((folder / relative).stat().st_size))
    assert f"{folder}: config.yaml has SHA-256" in refusal(folder, verify=True)


@pytest.mark.parametrize("place", OWNED)
@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to("/")]
)
def test_a_file_too_many(folder: Path, place: str, make: Callable[[Path], None]) -> None:
    (folder / place / "empty folder").mkdir()
    assert open_artifact(folder, verify=True).root == folder
    make(folder / place / "x")
    assert open_artifact(folder).root == folder
    assert refusal(folder, verify=True) == (
        f"{folder}: {place}x is not in the manifest; expected in graphs, programs, weights, tokenizer only the files "
        "that it lists; move the file out of the artifact"
    )


def test_users_may_keep_files_beside(folder: Path) -> None:
    (folder / "README.md").touch()
    (folder / "notes").mkdir()
    (folder / "notes" / "x").touch()
    assert open_artifact(folder, verify=True).root == folder


def test_a_file_that_this_user_may_not_read() -> None:
    with public_folder() as place:
        build_example(place / "a")
        (place / "a" / "config.yaml").chmod(0)
        with unprivileged():
            assert open_artifact(place / "a").root == place / "a"
            assert refusal(place / "a", verify=True) == (
                f"{place / 'a'}: config.yaml cannot be read (Permission denied); expected a file that this user may "
                "read; check its permissions and its disk, or restore the file"
            )


# The manifest


def test_a_flipped_byte_in_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"vocab_size": 7', b'"vocab_size": 6'))
    assert refusal(folder) == (
        f"{folder}/manifest.json is not in canonical form, or its digest disagrees with its content; "
        "expected the bytes that aot-compile wrote; restore the file or rebuild the artifact"
    )
    path.write_bytes(content.replace(b'"vocab_size"', b'"vocab_sizf"'))
    assert refusal(folder) == (
        f"{folder}/manifest.json is not a manifest (Object contains unknown field `vocab_sizf` - at `$.model`); "
        "expected the JSON that artifacts/FORMAT.md describes; restore the file or rebuild the artifact"
    )


def test_a_newer_format_is_told_before_anything_else(folder: Path) -> None:
    shutil.rmtree(folder / "graphs")
    (folder / "manifest.json").write_text('{"format_version": 3, "self_digest": "", "files": {"/etc/passwd": {}}}')
    with pytest.raises(FormatVersionError) as caught:
        open_artifact(folder)
    assert str(caught.value) == (
        f"{folder}/manifest.json has format version 3; expected version 1, which this package reads; "
        "use the release of aot-compiler that wrote it, or rebuild the artifact"
    )


def test_duplicate_keys(folder: Path) -> None:
    path = folder / "manifest.json"
    other = b'"files": {"/etc/passwd": {"sha256": "%s", "size": 0}},\n "files": {' % (b"0" * 64)
    path.write_bytes(path.read_bytes().replace(b'"files": {', other))
    assert "is not in canonical form" in refusal(folder)


def test_deep_nesting(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"x":' * 10**6)
    assert "is not a manifest (maximum recursion depth exceeded" in refusal(folder)


def test_a_huge_manifest_is_refused_unread(folder: Path, opened: list[str]) -> None:
    os.truncate(folder / "manifest.json", 200 * 2**20)
    assert refusal(folder) == (
        f"{folder}: manifest.json has 209715200 bytes; expected at most 67108864; do not use this artifact"
    )
    assert opened == []


def test_references_are_checked(folder: Path) -> None:
    rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, weights={}))
    assert refusal(folder) == (
        f"{folder}/manifest.json: layout tp1: parameter model.embed_tokens.weight has no weight; "
        "expected a manifest whose parts agree (artifacts/FORMAT.md); rebuild the artifact"
    )


# Paths that leave


def links_that_leave(folder: Path, outside: Path) -> Iterator[tuple[str, str]]:
    """Make links, one after another; yields what is refused and its path."""
    weights = file_in(folder, "weights/")
    (outside / "weights").mkdir(parents=True)
    shutil.copy(folder / weights, outside / weights)

    (folder / weights).unlink()
    (folder / weights).symlink_to(outside / weights)
    yield weights, "to a file"
    (folder / weights).unlink()
    (folder / weights).symlink_to("../graphs/next")
    (folder / "graphs" / "next").symlink_to(f"../../outside/{weights}")
    yield weights, "by way of another link"
    (folder / "graphs" / "next").unlink()
    shutil.rmtree(folder / "weights")
    (folder / "weights").symlink_to(outside / "weights")
    yield weights, "of a folder"


def test_links_that_leave_the_folder(folder: Path, tmp_path: Path, opened: list[str]) -> None:
    for relative, kind in links_that_leave(folder, tmp_path / "outside"):
        opened.clear()
        assert refusal(folder, verify=True) == (
            f"{folder}: path {relative!r} leaves the folder; expected relative paths inside the artifact; "
            "do not use this artifact"
        ), kind
        assert opened == ["manifest.json"], kind


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "graphs/../../outside", "..", "", "./config.yaml"])
def test_paths_that_leave_the_folder(folder: Path, path: str, opened: list[str]) -> None:
    (folder.parent / "outside").touch()
    record = FileRecord(size=0, sha256=hashlib.sha256(b"").hexdigest())
    rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, files={**manifest.files, path: record}))
    opened.clear()
    assert refusal(folder, verify=True) == (
        f"{folder}/manifest.json: path {path!r} leaves the folder; expected relative paths inside the artifact; "
        "do not use this artifact"
    )
    assert opened == ["manifest.json"]


def test_a_manifest_that_is_a_link_out(folder: Path, tmp_path: Path, opened: list[str]) -> None:
    (folder / "manifest.json").rename(tmp_path / "outside.json")
    (folder / "manifest.json").symlink_to(tmp_path / "outside.json")
    assert refusal(folder) == (
        f"{folder}: manifest.json is a link that leaves the folder; expected a manifest inside the artifact; "
        "do not use this artifact"
    )
    assert opened == []


def test_links_inside_the_folder_are_harmless(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "config.yaml").rename(folder / "kept" / "c")
    (folder / "config.yaml").symlink_to("kept/c")
    assert open_artifact(folder, verify=True).path("config.yaml").read_bytes() == b"output: revision-0\n"


def test_only_listed_files_have_a_path(folder: Path) -> None:
    artifact = open_artifact(folder)
    (folder / "tokenizer" / "x").touch()
    for relative in ("tokenizer/x", "manifest.json", "/etc/passwd", "../a/config.yaml"):
        with pytest.raises(CorruptArtifactError) as caught:
            artifact.path(relative)
        assert str(caught.value) == (
            f"{folder}: {relative} is used but not listed; expected every file under `files` of the manifest; "
            "rebuild the artifact"
        )


def test_a_link_made_after_opening_is_refused(folder: Path, tmp_path: Path) -> None:
    artifact = open_artifact(folder)
    (folder / "config.yaml").rename(tmp_path / "outside")
    (folder / "config.yaml").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptArtifactError, match=r"path 'config.yaml' leaves the folder"):
        artifact.path("config.yaml")


# Layouts


def test_layouts(folder: Path) -> None:
    artifact = open_artifact(folder)
    (only,) = artifact.manifest.layouts
    assert artifact.layout(None) is artifact.layout("tp1") is only
    with pytest.raises(LayoutNotFoundError) as caught:
        artifact.layout("tp2")
    assert str(caught.value) == "layout tp2; expected one of tp1; name one of these, or build the layout"

    second = msgspec.structs.replace(only, name="tp2", ranks=2)
    rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, layouts=(only, second)))
    artifact = open_artifact(folder)
    assert artifact.layout("tp2") == second
    with pytest.raises(LayoutNotFoundError) as caught:
        artifact.layout(None)
    assert str(caught.value) == (
        "no layout named, and a holds 2; expected one of tp1, tp2; name one of these, or build the layout"
    )


def test_file_record(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 10**6)
    assert file_record(tmp_path / "x") == FileRecord(size=3 * 10**6, sha256=hashlib.sha256(b"abc" * 10**6).hexdigest())


def test_the_example_is_what_these_tests_think(folder: Path) -> None:
    assert sorted(tree(folder)) == sorted([*listed(folder), "manifest.json"])
    assert len(listed(folder)) == 6
