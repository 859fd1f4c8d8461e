"""Capturing a message on a channel that other threads share."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_ext.app.capture import Capture


@pytest.mark.parametrize(("closed", "error"), [(True, OperationalError), (False, AttributeError)])
def test_a_channel_that_another_thread_closes(
    closed: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs know the first error from Celery and may retry; the other one is a fault."""

    def send() -> Any:
        monkeypatch.setattr(channel, "closed", closed)
        if closed:
            channel.connection = None
        return channel.connection.state if closed else channel.no_such_attribute

    with Celery(broker="memory://") as app, app.connection() as connection:
        channel = connection.channel()
        with pytest.raises(error):
            Capture(app, channel).of(send)


def test_what_another_app_sends_meanwhile_is_its_own() -> None:
    """For example a signal handler or a router sends it."""
    one, other = Celery(broker="memory://"), Celery(broker="memory://")
    seen = []

    def send() -> None:
        for app in (one, other):
            with app.producer_or_acquire() as producer:
                seen.append(producer.channel is capture)

    with one, other, one.connection() as connection, other.connection() as elsewhere:
        capture = Capture(one, connection.channel())
        Capture(other, elsewhere.channel())
        capture.of(send)
    assert seen == [True, False]
