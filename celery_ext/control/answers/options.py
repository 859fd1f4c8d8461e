"""The options of expectations."""

from __future__ import annotations

from dataclasses import dataclass

from celery import Celery

from celery_ext.app.settings import option, parse

#: The name of the setting in an app's configuration.
SETTING = "delayed_expectations"

#: How to enable expectations.
HOW = f"set `{SETTING} = {{}}`, or a dict of options, for whoever asks and for workers"


@dataclass(frozen=True)
class ExpectationOptions:
    """The validated setting `delayed_expectations` of an app. Raises OptionError if it is invalid.

    Without it an app cannot expect answers; an empty dict is enough. Programs that ask and programs
    that answer must have the same options.
    """

    queue: str = option(
        "",
        "The queue in which expectations wait for their answer or timeout. A worker must "
        "consume it. Empty: the app's `task_default_queue`.",
    )
    timeout_seconds: float = option(
        86_400.0,
        "The default timeout, if no `Timeout` policy of the task or of its queue has one.",
        0.001,
        10 * 366 * 86_400,
    )
    early_seconds: float = option(
        3_600.0,
        "How long to keep an answer that arrives before anyone expects it. 0 disables this.",
        0,
        366 * 86_400,
    )
    early_limit: int = option(100_000, "How many early answers are kept.", 1, 100_000_000)
    remember_seconds: float = option(
        86_400.0,
        "How long the outcome of an expectation is kept. During this time a second answer "
        "gets `late`.",
        1,
        366 * 86_400,
    )
    answer_bytes: int = option(1 << 20, "Maximum size of an answer as JSON.", 100, 1 << 28)

    @classmethod
    def of(cls, app: Celery) -> ExpectationOptions:
        found = parse(cls, SETTING, app.conf.get(SETTING) or {})
        if found.queue:
            return found
        return cls(**{**vars(found), "queue": str(app.conf.task_default_queue)})

    @staticmethod
    def are_set(app: Celery) -> bool:
        """Returns whether an app may expect answers."""
        return app.conf.get(SETTING) is not None

    @property
    def remember_ms(self) -> int:
        return int(self.remember_seconds * 1000)
