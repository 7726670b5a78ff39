"""The one error base of the compile side."""


class BuildError(Exception):
    """Something the caller can act on; the message names what was wrong, what is allowed and what to do."""
