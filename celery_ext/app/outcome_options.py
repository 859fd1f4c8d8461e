"""The options for the outcomes that workers record."""

from __future__ import annotations

from dataclasses import dataclass

from celery import Celery

from kombu_delayed.store.outcomes.records import Kept

from .settings import option, parse

#: The name of the setting in an app's configuration.
SETTING = "delayed_outcomes"


@dataclass(frozen=True)
class OutcomeOptions:
    """The validated setting `delayed_outcomes` of an app. Raises OptionError for invalid values."""

    limit: int = option(
        10_000,
        "How many tasks each queue keeps: about this many that failed or were retried, and this "
        "many others. At most twice as many are kept.",
        100,
        100_000,
    )
    days: float = option(
        7.0, "How long they are kept, at least. At most they are kept twice as long.", 0.01, 366
    )
    interval_seconds: float = option(1.0, "How often a worker writes new events.", 0.05, 10)
    buffer: int = option(
        20_000,
        "How many events a worker keeps while Redis is slow or unreachable. Further events are "
        "dropped and counted.",
        100,
        1_000_000,
    )
    slow_seconds: float = option(
        60.0,
        "Tasks that run for at least this long, or over their time limit, are listed as slow.",
        0,
        31_536_000,
    )
    arguments: bool = option(
        True, "Whether a failure is kept with the arguments of its task, up to 200 characters each."
    )

    @property
    def kept(self) -> Kept:
        return Kept(self.limit, int(self.days * 86_400_000))

    @classmethod
    def of(cls, app: Celery) -> OutcomeOptions | None:
        """The options of an app, or None if `delayed_outcomes = False` turns recording off."""
        given = app.conf.get(SETTING)
        if given is False:
            return None
        return parse(cls, SETTING, {} if given in (None, True) else given)
