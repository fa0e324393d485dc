"""Signals that ask a run to end: Ctrl-C, a scheduler's SIGTERM, a terminal that is gone."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupts:
    """While entered, these signals raise KeyboardInterrupt; `check` raises it again if a callback swallowed it."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[Any, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._raise) for each in ASKING}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise if a signal came, for an exception inside a callback of C code is only printed."""
        if self.asked:
            raise KeyboardInterrupt
