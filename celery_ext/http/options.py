"""What can be set of the HTTP API and of HTTP jobs: one home per option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery import Celery

from ..app.settings import option, parse

#: Where an app's configuration has them.
SETTING = "delayed_http"


@dataclass(frozen=True)
class HttpOptions:
    """The setting `delayed_http` of an app. Raises OptionError if it is invalid."""

    tasks: tuple[str, ...] = option(
        (),
        "Names of the tasks that may be scheduled, with `*` and `?`. Empty: those that the app "
        "knows, but for Celery's own.",
    )
    job_queue: str = option("", "The queue of HTTP jobs that name none. Empty: as Celery routes.")
    threads: int = option(8, "Threads that talk to Redis.", 1, 256)
    waiting: int = option(
        1_000, "Requests that may wait for a thread; beyond it the answer is 503.", 1, 100_000
    )
    rows_waiting: int = option(
        20_000, "Tasks that may wait to be sent; beyond it the answer is 503.", 1, 10_000_000
    )
    streams: int = option(
        100, "Event streams and long polls at a time, half of them of one token.", 1, 100_000
    )
    body_bytes: int = option(1 << 20, "Size of a request's body.", 1, 1 << 30)
    bulk_bytes: int = option(64 << 20, "Size of an NDJSON body.", 1, 1 << 40)
    header_seconds: float = option(10.0, "Time for the head of a request.", 0.01, 3600)
    body_seconds: float = option(
        30.0,
        "Time between two parts of a body; a body takes ten times as long at the most.",
        0.01,
        3600,
    )
    answer_seconds: float = option(30.0, "Time for an answer of Redis.", 0.01, 3600)
    session_seconds: int = option(43_200, "How long a login to the pages lasts.", 60, 31_536_000)
    rate: float = option(
        0.0,
        "Requests per second of a token, or of all without one, in one process. 0: any.",
        0,
        1_000_000,
    )
    callback_secrets: tuple[str, ...] = option(
        (), "Secrets that callbacks are signed with: all of them, so that one can be replaced."
    )
    callback_allow: tuple[str, ...] = option(
        (),
        "Hosts, or host:port, that callbacks may go to wherever they are, with `*` and `?`; "
        "others must have public addresses.",
    )
    callback_seconds: float = option(10.0, "Time for a whole callback.", 0.1, 3600)
    callback_bytes: int = option(1 << 16, "How much of a callback's answer is read.", 1, 1 << 24)
    callback_per_host: int = option(20, "Callbacks to one host at a time.", 1, 100_000)

    @classmethod
    def of(cls, app: Celery) -> HttpOptions:
        return cls.parse(app.conf.get(SETTING) or {})

    @classmethod
    def parse(cls, given: Any) -> HttpOptions:
        """Check a dict of options. Raises OptionError that names the option and the value."""
        return parse(cls, SETTING, given)
