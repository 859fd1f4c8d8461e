"""What can be set of the outcomes that workers record: one home per option."""

from __future__ import annotations

from dataclasses import dataclass

from celery import Celery

from kombu_delayed.store.outcomes.records import Kept

from .settings import option, parse

#: Where an app's configuration has them.
SETTING = "delayed_outcomes"


@dataclass(frozen=True)
class OutcomeOptions:
    """The setting `delayed_outcomes` of an app, checked. Raises OptionError for what is wrong."""

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
        """Those of an app; None: `delayed_outcomes = False`, so nothing is recorded."""
        given = app.conf.get(SETTING)
        if given is False:
            return None
        return parse(cls, SETTING, {} if given in (None, True) else given)
