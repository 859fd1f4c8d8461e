"""The tools: which packages to install, which scenario drives them, and user settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """One tool in an environment of its own.

    `known` are the checks that fail with `delayed+redis://` and work with a plain URL; `setting` is
    the setting a user needs, and `remark` a difference from the stock transport.
    """

    name: str
    requirements: tuple[str, ...]
    scenario: str
    setting: str = "nothing"
    remark: str = ""
    known: frozenset[str] = frozenset()
    #: Packages of a separate environment without this package, for tools that run as a container.
    apart: tuple[str, ...] = ()


NO_SETTING = frozenset({"with no setting of its own"})
CELERY = ("celery", "redis>=6.4,<9")

TOOLS = (
    Tool(
        "flower",
        ("flower",),
        "flower_monitor",
        "for the Broker tab and queue lengths: a plain URL, or `celery -b redis://… flower`",
        "Queue lengths count what is ready. `celery delayed` and the dashboard show the rest.",
        frozenset({"the Broker tab", "queue lengths"}),
    ),
    Tool(
        "celery-redbeat",
        ("celery-redbeat",),
        "redbeat_schedule",
        "`redbeat_redis_url`, or a plain URL",
        known=NO_SETTING,
    ),
    Tool("django-celery-beat", ("django-celery-beat",), "django_tools"),
    Tool("django-celery-results", ("django", "django-celery-results"), "django_tools"),
    Tool("django-health-check", ("django", "django-health-check"), "django_tools"),
    Tool(
        "celery-singleton",
        ("celery-singleton",),
        "singleton",
        remark="[Unique tasks](guides/unique.md) are built in.",
    ),
    Tool("celery_once", ("celery_once",), "once", "its own `ONCE`, as with every broker"),
    Tool("celery-batches", ("celery-batches",), "batches"),
    Tool("sentry-sdk", ("sentry-sdk",), "sentry"),
    Tool(
        "opentelemetry-instrumentation-celery",
        ("opentelemetry-instrumentation-celery", "opentelemetry-sdk"),
        "telemetry",
        remark="[`celery_ext.tracing`](guides/metrics.md) adds the wait in the backlog.",
    ),
    Tool(
        "pytest-celery",
        ("pytest-celery",),
        "pytest_plugins",
        remark="Its clusters of containers were not tried: they need Docker.",
    ),
    Tool(
        "apache-airflow",
        # With Celery 5.7 the executor cannot be imported; 5.5 brings an older redis-py.
        (
            "apache-airflow>=3",
            "apache-airflow-providers-celery",
            "apache-airflow-providers-standard",
            "celery>=5.6,<5.7",
        ),
        "airflow_executor",
        "`[celery] broker_url`",
        "Airflow's provider needs Celery 5.6, with any transport. A plain URL needs "
        "`broker_transport` in a module that `celery_config_options` names. Airflow 2.11.2 was "
        "last tried on 2026-11-23, and worked in the same way.",
    ),
    Tool(
        "prometheus-exporter-celery",
        (),
        "exporter",
        "`--broker-url=redis://…`",
        "This is celery-exporter's name on the package index. It ran in an environment without "
        "this package, as in its container: it reads Celery's events, which a plain URL finds in "
        "the same database. Queue lengths count what is ready; [our own "
        "metrics](guides/metrics.md) have the rest.",
        # It pins an older redis-py than the newest Kombu takes.
        apart=("prometheus-exporter-celery", "kombu<5.6", "packaging"),
    ),
    Tool(
        "superset-settings",
        (),
        "other_apps",
        "`CeleryConfig.broker_url`",
        "A Celery app with settings in the form of Superset's; Superset itself was not installed.",
    ),
    Tool(
        "sentry-settings",
        (),
        "other_apps",
        "`BROKER_URL`",
        "A Celery app with settings in the form of Sentry's own server: old names, pickle, 61 "
        "queues. Sentry itself was not installed.",
    ),
    Tool("gevent", ("gevent",), "greenlets"),
    Tool("eventlet", ("eventlet",), "greenlets"),
)
