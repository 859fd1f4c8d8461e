"""The pytest plugin: a broker for the session, empty for each test, and a clock that it goes by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .broker import Broker
    from .clock import Clock

# Every pytest run imports this module: what is heavy is imported where it is used.


@pytest.fixture(scope="session")
def delayed_broker_url() -> Iterator[str]:
    """URL of a broker of its own for this test session; use `delayed_broker` for an empty one."""
    from .session import session_server

    with session_server() as directory:
        yield f"delayed+embedded://{directory}"


@pytest.fixture
def delayed_broker(delayed_broker_url: str) -> Iterator[Broker]:
    """The session's broker, without any message."""
    from .broker import Broker

    broker = Broker(delayed_broker_url)
    broker.empty()
    yield broker
    broker.empty()
    broker.close()


@pytest.fixture
def delayed_clock(delayed_broker: Broker) -> Clock:
    """The clock by which messages of `delayed_broker` fall due: `advance(days=3)`."""
    from .clock import Clock

    return Clock(delayed_broker)
