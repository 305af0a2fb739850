"""The errors that every kind of checkpoint file shares."""

from pathlib import Path

from artifacts.errors import CorruptCheckpointError

_LFS_POINTER = b"version https://git-lfs"


def corrupt_file(label: str, fault: str, *, kind: str) -> CorruptCheckpointError:
    """Error for a file that is damaged.

    Args:
        label: the file as the user knows it.
        fault: what is wrong, to follow the label in a sentence.
        kind: name of the format.
    """
    return CorruptCheckpointError(
        found=f"{label} {fault}", expected=f"a whole {kind} file", action="fetch or convert it again"
    )


def wrong_start(path: Path, label: str, *, kind: str) -> CorruptCheckpointError:
    """Error for a file whose first bytes are not those of its format; tells a Git LFS pointer from other content."""
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        return CorruptCheckpointError(
            found=f"{label} is a Git LFS pointer, not the file itself",
            expected=f"a whole {kind} file",
            action="run `git lfs pull` in its folder",
        )
    return corrupt_file(label, f"does not start like a {kind} file", kind=kind)
