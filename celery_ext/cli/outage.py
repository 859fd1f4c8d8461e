"""Lets a command that follows the broker continue after an outage of it."""

from __future__ import annotations

from types import TracebackType

from kombu.exceptions import OperationalError

from kombu_delayed.errors import UNREACHABLE, DelayedError, ServerNotReady

from .session import Session


class Outages:
    """Ends a block that has lost the broker without an error, and says so once for each outage.

    The first block must reach the broker: before that, its URL may be wrong.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_begun = self._is_lost = False

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            if self._is_lost:
                self._session.err.print("The broker is back.")
            self._has_begun, self._is_lost = True, False
        elif not self._has_begun or not _is_outage(error):
            return False
        elif not self._is_lost:
            self._is_lost = True
            text = " ".join(str(error).split())
            self._session.err.print(f"Lost the broker, trying again: {text}")
        return True


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, DelayedError):
        return isinstance(error, ServerNotReady)
    return isinstance(error, (OperationalError, *UNREACHABLE))
