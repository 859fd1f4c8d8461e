"""A process with a wrong clock; the clock of its server stays right.

python -m tests.kit.skewed SECONDS worker …     a Celery worker of `tests.kit.tasks_app`
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

_real = datetime.datetime


class _Either(type):
    """Instances of the real class count as instances of the other one, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real)


def set_clock(ahead_seconds: float) -> None:
    """Move this process's clock; must be called before anything else is imported."""
    now = time.time

    class Skewed(_real, metaclass=_Either):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    time.time = lambda: now() + ahead_seconds
    time.time_ns = lambda: int(time.time() * 1e9)
    datetime.datetime = Skewed  # type: ignore[misc]


if __name__ == "__main__":
    set_clock(float(sys.argv[1]))

    from tests.kit.tasks_app import app

    app.worker_main(sys.argv[2:])
