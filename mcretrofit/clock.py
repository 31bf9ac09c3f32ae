"""Time spent decoding, apart from the rest of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds and number of a run's decoding steps."""

    seconds: float = 0.0
    steps: int = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began
        self.steps += 1
