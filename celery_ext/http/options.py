"""The options of the HTTP API and of HTTP jobs; each is defined only here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery import Celery

from ..app.settings import option, parse

#: The setting of an app that has the options.
SETTING = "delayed_http"

#: How to enable HTTP jobs.
HOW = f'set `{SETTING} = {{"callbacks": True}}` for servers and workers'


@dataclass(frozen=True)
class HttpOptions:
    """The setting `delayed_http` of an app. Raises OptionError if it is invalid."""

    tasks: tuple[str, ...] = option(
        (),
        "Names of the tasks that may be scheduled, with `*` and `?`. Empty: the tasks that "
        "the app knows, except Celery's own.",
    )
    callbacks: bool = option(
        False,
        "Whether to take HTTP jobs, and whether workers post to their callbacks. `python -m "
        "celery_ext.http` sets it.",
    )
    job_queue: str = option(
        "", "The queue of HTTP jobs without a queue. Empty: Celery's routing decides."
    )
    threads: int = option(8, "Number of threads for calls to Redis.", 1, 256)
    waiting: int = option(
        1_000, "Requests that may wait for a thread. Further requests get a 503.", 1, 100_000
    )
    rows_waiting: int = option(
        20_000, "Tasks that may wait to be sent. Further tasks get a 503.", 1, 10_000_000
    )
    streams: int = option(
        1_000,
        "Concurrent event streams, exports and live pages. One token may use half of them.",
        1,
        100_000,
    )
    polls: int = option(1_000, "Concurrent long polls. One token may use half of them.", 1, 100_000)
    body_bytes: int = option(1 << 20, "Maximum size of a request's body.", 1, 1 << 30)
    bulk_bytes: int = option(64 << 20, "Maximum size of an NDJSON body.", 1, 1 << 40)
    header_seconds: float = option(10.0, "Timeout for the headers of a request.", 0.01, 3600)
    body_seconds: float = option(
        30.0,
        "Timeout between two parts of a body. A whole body may take ten times as long.",
        0.01,
        3600,
    )
    answer_seconds: float = option(30.0, "Timeout for an answer of Redis.", 0.01, 3600)
    session_seconds: int = option(43_200, "How long a login to the pages lasts.", 60, 31_536_000)
    rate: float = option(
        0.0,
        "Maximum requests per second of a token, or of all requests without a token, in one"
        " process. `/healthz`, and styles and scripts of the dashboard, do not count. 0: no limit.",
        0,
        1_000_000,
    )
    callback_secrets: tuple[str, ...] = option(
        (),
        "Secrets for signing callbacks. Each callback is signed with all of them, so "
        "that you can rotate them.",
    )
    callback_allow: tuple[str, ...] = option(
        (),
        "Hosts, or host:port, with `*` and `?`, to which callbacks may go at any address. "
        "Other hosts must have public addresses.",
    )
    callback_seconds: float = option(
        10.0, "Timeout for a whole callback whose job has none of its own.", 0.1, 3600
    )
    callback_longest_seconds: float = option(
        60.0, "The longest timeout that a job may have of its own.", 1, 3600
    )
    callback_bytes: int = option(1 << 16, "Maximum size of a callback's answer.", 1, 1 << 24)
    callback_per_host: int = option(
        20, "Concurrent callbacks to one host, of all workers together.", 1, 100_000
    )
    callback_share: float = option(
        0.25,
        "The share of a worker's concurrency that callbacks to one host may occupy, at least"
        " one slot. Further jobs for the host are postponed, so that a slow host delays no other.",
        0.001,
        1,
    )

    @classmethod
    def of(cls, app: Celery) -> HttpOptions:
        return cls.parse(app.conf.get(SETTING) or {})

    @classmethod
    def parse(cls, given: Any) -> HttpOptions:
        """Check a dict of options. Raises OptionError that names the option and the value."""
        return parse(cls, SETTING, given)
