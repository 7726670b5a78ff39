"""Fresh processes that wait for one another before what is measured and after it, by their standard streams alone."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from time import monotonic

from flashkda.errors import FlashKDAError

#: The last argument of each process, and the line that it prints whenever it waits for the others.
READY = "ready"

# How far a process is, and what one is that is not so far in time.
_WAITS, _MEASURED, _ENDED = 1, 2, 3
_LATE = {_WAITS: "not ready", _MEASURED: "without a result", _ENDED: "not at its end"}


def run_together(command: Sequence[str], count: int, timeout_s: float, what: str) -> list[str]:
    """What so many processes of one command printed to their standard output, but for `READY`.

    Each has to print `READY` as a line of its own and to wait for a line on its standard input twice: before it
    measures, and then before it ends, which would disturb those that still measure. It gets that line once all of them
    wait; the end of its input says that nobody waits for it any more. timeout_s: until all wait, have measured, have
    ended, each; what: they are, in errors. However this ends, all processes are gone then. Raises `FlashKDAError` at
    the first process that fails, and with those that did not answer in time.
    """
    group: list[_Process] = []
    try:
        for number in range(1, count + 1):
            group.append(_Process([*command, READY], number))
        for stage in (_WAITS, _MEASURED):
            _wait(group, stage, timeout_s, what)
            for one in group:
                one.let_on()
        _wait(group, _ENDED, timeout_s, what)
    finally:
        for one in group:
            one.process.kill()
        for one in group:
            # Closes its streams and waits for it.
            with one.process:
                pass
    return ["\n".join(line for line in one.lines() if line != READY) for one in group]


class _Process:
    """One of a group: what it has printed so far, and which of its two outputs are still open."""

    def __init__(self, command: Sequence[str], number: int) -> None:
        self.number = number
        # Unbuffered: what select says of a pipe has to be all there is.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._output, self._errors = self.process.stdout.fileno(), self.process.stderr.fileno()
        self._printed = {self._output: bytearray(), self._errors: bytearray()}
        self.open = {self._output, self._errors}

    def read(self, descriptor: int) -> None:
        """Take what there is in one of its outputs, or that it is closed."""
        data = os.read(descriptor, 1 << 16)
        self._printed[descriptor] += data
        if not data:
            self.open.remove(descriptor)

    def lines(self) -> list[str]:
        """Whole ones that it has printed to its standard output."""
        return self._printed[self._output].decode(errors="replace").split("\n")[:-1]

    def let_on(self) -> None:
        assert self.process.stdin is not None
        # One that has failed by now is found by its end.
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")

    @property
    def has_ended(self) -> bool:
        """Whether it has closed both outputs and is gone, so that it has an exit code."""
        return not self.open and self.process.poll() is not None

    @property
    def stage(self) -> int:
        return _ENDED if self.has_ended else self.lines().count(READY)

    def require_no_failure(self, what: str) -> None:
        """Raise `FlashKDAError` if it has ended with an error, or before its time."""
        if self.has_ended and (self.process.returncode or self.lines().count(READY) < _MEASURED):
            said = self._printed[self._errors].decode(errors="replace")[-2000:]
            raise FlashKDAError(f"{what}: process {self.number} failed with code {self.process.returncode}: {said}")


def _wait(group: Sequence[_Process], stage: int, timeout_s: float, what: str) -> None:
    """Read what a group prints until all of it is so far. Raises `FlashKDAError`."""
    deadline = monotonic() + timeout_s
    with DefaultSelector() as selector:
        for one in group:
            for descriptor in one.open:
                selector.register(descriptor, EVENT_READ, one)
        while True:
            for one in group:
                one.require_no_failure(what)
            late = [str(one.number) for one in group if one.stage < stage]
            if not late:
                return
            left = deadline - monotonic()
            if left <= 0:
                numbers = f"process{'es' if len(late) > 1 else ''} {', '.join(late)}"
                raise FlashKDAError(f"{what}, took longer than {timeout_s} s: {numbers} of {len(group)} {_LATE[stage]}")
            # That a process is gone is no event, and comes some time after its outputs are closed.
            closed = any(not one.open and not one.has_ended for one in group)
            for key, _ in selector.select(min(left, 0.01) if closed else left):
                key.data.read(key.fd)
                if key.fd not in key.data.open:
                    selector.unregister(key.fd)
