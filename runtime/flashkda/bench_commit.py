"""Which commit ran. An installed wheel has none: there the manifest's digest in the report says what ran."""

import subprocess
from pathlib import Path

# What the build and the benchmark write themselves; paths from the checkout's root.
_OUTPUTS = ("artifacts", "manifests", "build_kernels/measurements")


def checkout_commit(file: Path) -> str | None:
    """The commit, 12 digits, of the checkout that `file` is tracked in; None outside of one, or without git.

    "-dirty" is behind it if any tracked file was changed that is no output of ours.
    """

    def git(*arguments: str) -> str | None:
        # Git refuses a checkout of another user's, as containers have them, lest its configuration run commands of
        # theirs. This code is theirs already. And nothing is written: no refreshed index.
        command = ["git", "-c", "safe.directory=*", "--no-optional-locks", "-C", str(file.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    ours = [f":(top,exclude){path}" for path in _OUTPUTS]
    unchanged = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *ours) == ""
    return commit if unchanged else f"{commit}-dirty"
