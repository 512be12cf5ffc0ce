"""A polite end: SIGTERM is noticed between two steps."""

import signal
import sys

import jax
from jax.experimental import multihost_utils


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""


class StopSignal:
    """Notices SIGTERM, so that a run can save before it ends."""

    def __enter__(self) -> "StopSignal":
        """Begins to listen."""
        self._received = False
        self._previous = None
        if jax.process_count() == 1:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, *_: object) -> None:
        self._received = True
        print("SIGTERM: saving after this step", file=sys.stderr, flush=True)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; the same in every process."""
        if jax.process_count() == 1:
            return self._received
        # JAX's own service catches the signal and picks a step all can stop after.
        return multihost_utils.reached_preemption_sync_point(step)
