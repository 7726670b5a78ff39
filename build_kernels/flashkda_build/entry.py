"""What the script `flashkda-build` calls: the wheel brings it along, also where the extra that it needs is missing."""

import sys

#: What the commands import of that extra; the compiler is only looked for when something is compiled.
_ELF_READER = "elftools"


def main() -> None:
    """Run `flashkda-build`; without the extra, end with one line and exit code 1."""
    try:
        from .cli import main as command

        command()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _ELF_READER:
            raise
        sys.exit("Error: flashkda-build needs the extra `build`, which is not installed; pip install 'flashkda[build]'")
