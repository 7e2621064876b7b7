# SPDX-License-Identifier: Apache-2.0
"""Signals as interruption: the first ends a drill, later ones cannot stop the way back to lru."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end a drill


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, TERM or HUP arrived; the text names the signal."""


@contextmanager
def signals_as_interruption() -> Iterator[None]:
    """Raise Interrupted at the first signal; later ones are ignored, so that every `finally` runs.

    What follows the first one is the way back to lru. HUP stays ignored where it was (nohup); INT
    and TERM are meant for the drill also where it was started in the background.
    """

    def stop(number: int, frame: object) -> None:
        ignore_signals()
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if not _ignored_hup(number)]
    try:
        for number in heard:
            signal.signal(number, stop)
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def ignore_signals() -> None:
    """Let the way back to lru, which is short, finish whatever arrives."""
    for number in SIGNALS:
        if _ignored_hup(number):
            continue
        # Not SIG_IGN: a command that the way back starts would inherit that.
        signal.signal(number, lambda number, frame: None)


def _ignored_hup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
