"""Every exception the package raises on purpose; all derive from `FlashKDAError`."""


class FlashKDAError(Exception):
    """Base of all errors raised by flashkda."""


class ArgumentError(FlashKDAError, ValueError):
    """An argument of a public function is not usable.

    argument: its name; value: what it was, in words; allowed: what it may be; remedy: what to do about it.
    """

    def __init__(self, argument: str, value: str, allowed: str, remedy: str) -> None:
        # All four go to `args`, so that the error survives pickling (multiprocessing sends errors that way).
        super().__init__(argument, value, allowed, remedy)
        self.argument = argument
        self.value = value
        self.allowed = allowed
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.argument} is {self.value}, but must be {self.allowed}: {self.remedy}"


class ArtifactError(FlashKDAError):
    """The manifest or a compiled kernel file is missing, changed, malformed or not this package's."""


class NoArtifactError(FlashKDAError):
    """No compiled kernel fits the device.

    reason: what was asked for and what there is, in one line; refused: for every candidate, its file name and the
    reasons against it.
    """

    def __init__(self, reason: str, refused: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
        super().__init__(reason, refused)
        self.reason = reason
        self.refused = refused

    def __str__(self) -> str:
        return self.reason


class DriverError(FlashKDAError, RuntimeError):
    """There is no CUDA driver, it is too old, or one of its calls failed."""


class AliasError(FlashKDAError):
    """Another `flash_kda` is installed or imported, so that this package does not answer to that name."""


def describe(value: object) -> str:
    """A value in words for an error: plain ones as Python spells them, shortened, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        try:
            shown = repr(value)
        except ValueError:
            # Python refuses to spell integers of thousands of digits.
            return "an enormous integer"
        return shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"a {type(value).__module__}.{type(value).__qualname__}"
