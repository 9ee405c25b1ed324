"""Connection of a training loop to its user."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isqn.train.progress import Progress


class Control(NamedTuple):
    """Functions that a loop calls while it trains."""

    progress: Progress  # where it reports
    should_stop: Callable[[], bool]  # whether it must save and stop
