"""A value in one short line, for messages."""

import reprlib


def shown(value: object) -> str:
    """``repr`` of a value, cut short and free of line breaks."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return f"a {type(value).__name__} too long to print"
