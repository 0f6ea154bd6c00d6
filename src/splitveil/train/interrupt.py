"""Ctrl-C that lets the step in hand finish and the state be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Set once somebody asked to stop."""

    requested: bool = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turn the first SIGINT into a request; a second one stops at once.

    Outside the main thread signals cannot be caught, and nothing is changed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        interrupt.requested = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
