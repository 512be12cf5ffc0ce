"""A polite end: SIGTERM is noticed between two steps."""

import signal
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, step: int) -> None:
        """Says after which step."""
        super().__init__(
            f"Stopped after step {step}, which is saved. The same command goes on from "
            "there."
        )


class StopSignal:
    """Notices SIGTERM, so that a run can save before it ends."""

    def __init__(self) -> None:
        """Has received nothing yet."""
        self._received = False
        self._previous: Any = None

    def __enter__(self) -> "StopSignal":
        """Begins to listen."""
        if jax.process_count() == 1:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, *_: object) -> None:
        self._received = True
        print("SIGTERM: saving, then stopping", file=sys.stderr, flush=True)

    def check(self, step: int) -> None:
        """Raises amid the evaluation of `step`, unless there are other processes."""
        if self._received:
            raise Interrupted(step)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; the same in every process."""
        if jax.process_count() == 1:
            return self._received
        # JAX's own service catches the signal and picks a step all can stop after.
        return multihost_utils.reached_preemption_sync_point(step)
