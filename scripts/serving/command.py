# SPDX-License-Identifier: Apache-2.0
"""How a command ends: its exit code, and what may still go wrong around it.

Everything that a command prints goes through here, so that no secret leaves with it, and a lost
terminal or a closed pipe does not end what has to be finished.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from serving.console import say
from serving.secret import redacted, remember_address, remember_environment

COULD_NOT_RUN = 2


class Output(io.TextIOBase):
    """A standard stream: secrets are taken out, and one that is gone is noted in `lost`.

    lost: None, or why nothing more can be written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = "it is closed" if stream is None else None
        if isinstance(stream, io.TextIOWrapper):
            # A name in the answer of a server must not be what ends a command.
            stream.reconfigure(errors="backslashreplace")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", "utf-8")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(redacted(text)))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, use: Callable[[TextIO], object]) -> None:
        if self._stream is None or self.lost:
            return
        try:
            use(self._stream)
        except (OSError, ValueError) as error:
            self.lost = str(getattr(error, "strerror", None) or error)
            self._drop()

    def _drop(self) -> None:
        # What is left in the buffer would be written, and fail, when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self.fileno())
        except (OSError, ValueError):
            pass
        finally:
            os.close(nowhere)


def run_command(main: Callable[[], int], *, result: str = "on stdout") -> int:
    """Run a command's `main` as a process does; returns the exit code.

    result: where its result is, besides what it prints: a command whose result is "on stdout" alone
    could not run (2) when that cannot be written. 1 comes from `main` alone: whatever else goes
    wrong is 2, one line on stderr, no traceback.
    """
    _hold_standard_files()
    output = Output(sys.stdout)
    sys.stdout, sys.stderr = output, Output(sys.stderr)
    name = Path(sys.argv[0]).stem
    remember_environment()
    for argument in sys.argv[1:]:
        if "@" in argument:
            remember_address(argument.rpartition("=")[2] if "=" in argument else argument)
    code = _code_of(main, name)
    sys.stdout.flush()
    if output.lost and result == "on stdout" and code != COULD_NOT_RUN:
        say(f"{name}: the result cannot be written on stdout ({output.lost}): give it a file")
        code = COULD_NOT_RUN
    sys.stderr.flush()
    return code


def unexpected(error: BaseException) -> str:
    """Return one line on an error that nobody foresaw: what it is, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''} (at {where or 'no line'})"


def _code_of(main: Callable[[], int], name: str) -> int:
    try:
        return main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else COULD_NOT_RUN * bool(ended.code)
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
    except MemoryError:
        say(f"{name}: there is not enough memory: ask for fewer or shorter requests")
    except Exception as error:
        say(f"{name}: could not run: {unexpected(error)}; report this with the command")
    return COULD_NOT_RUN


def _hold_standard_files() -> None:
    """Open what the caller has closed: a file opened later must not be taken for stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
