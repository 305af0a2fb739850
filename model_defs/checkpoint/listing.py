"""Names in a message."""

from collections.abc import Sequence

_LISTED = 8


def listing(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
