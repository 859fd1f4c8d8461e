"""The app for tests with a queue without acks and a broadcast: a taken message is gone."""

from __future__ import annotations

from celery import Celery
from kombu import Queue
from kombu.common import Broadcast

from tests.kit.tasks_app import Settings, make_app

NO_ACK, BROADCAST = "unacked", "news"


def add_queues(app: Celery) -> Celery:
    app.conf.task_queues = [Queue("celery"), Queue(NO_ACK, no_ack=True), Broadcast(BROADCAST)]
    return app


app = add_queues(make_app(Settings.from_environment()))
