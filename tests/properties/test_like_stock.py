"""Kombu programs get the same answers as on the stock transport, in any order of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection
from kombu.exceptions import ChannelError, KombuError

from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

QUEUES = ["red", "blue"]
EXCHANGES = {"direct": "direct", "topic": "topic"}
KEYS = ["mail.new", "other", "red", "red", *QUEUES]
PATTERNS = [*KEYS, "mail.*", "#"]

queues = st.sampled_from(["red", *QUEUES])
exchanges = st.sampled_from([*EXCHANGES])
places = st.integers(0, 9)
publish = st.tuples(
    st.just("publish"),
    st.sampled_from(["", "", "", *EXCHANGES]),
    st.sampled_from(KEYS),
    st.sampled_from([None, 0, 0, 5]),
)
steps = st.one_of(
    publish,
    publish,
    publish,
    st.tuples(st.just("get"), queues, st.just(False)),
    st.tuples(st.just("get"), queues, st.booleans()),
    st.tuples(st.just("consume"), queues),
    st.tuples(st.just("ack"), places),
    st.tuples(st.just("reject"), places, st.booleans()),
    st.tuples(st.sampled_from(["declare", "purge", "look"]), queues),
    st.tuples(st.just("declare_exchange"), exchanges),
    st.tuples(st.just("bind"), queues, exchanges, st.sampled_from(PATTERNS)),
    st.tuples(st.just("delete"), queues, st.booleans(), st.booleans()),
    st.tuples(st.just("limit"), st.sampled_from([0, 1, 3])),
    st.tuples(st.sampled_from(["recover", "close_channel", "close"])),
)


class Program:
    """Uses one of the transports. Each method is a step, and returns what the program sees."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = Connection(url)
        self.channel = self.connection.channel()
        self.held: list[Any] = []
        self._sent = self._limit = 0
        for queue in QUEUES:
            self.declare(queue)

    def step(self, name: str, *given: Any) -> Any:
        try:
            return getattr(self, name)(*given)
        except (KombuError, ChannelError, KeyError) as error:
            return type(error).__name__, str(error).partition(" in vhost")[0]

    def may_take(self, name: str, *given: Any) -> bool:
        """Whether both transports say what happens.

        The stock transport puts a message back into all queues of its exchange, and several of them
        in the reverse order.
        """
        if name == "reject" and given[1] and self.held:
            return self._of_queue([self.held[given[0] % len(self.held)]])
        if name in ("recover", "close_channel", "close"):
            return len(self.held) < 2 and self._of_queue(self.held)
        return True

    def _of_queue(self, messages: Sequence[Any]) -> bool:
        return not any(each.delivery_info["exchange"] for each in messages)

    def publish(self, exchange: str, key: str, priority: int | None) -> None:
        self._sent += 1
        body, headers = f"message {self._sent}", {"number": self._sent}
        message = self.channel.prepare_message(body, priority=priority, headers=headers)
        self.channel.basic_publish(message, exchange, key)

    def get(self, queue: str, no_ack: bool) -> Any:
        message = self.channel.basic_get(queue, no_ack=no_ack)
        if message is None:
            return None
        if not no_ack:
            self.held.append(message)
        return self._seen(message)

    def consume(self, queue: str) -> Any:
        if not self.look(queue) or 0 < self._limit <= len(self.held):
            return None
        found: list[Any] = []
        self.channel.basic_consume(queue, False, found.append, "tag")
        try:
            while not found:
                self.connection.drain_events(timeout=60)
        finally:
            self.channel.basic_cancel("tag")
        self.held += found
        return [*map(self._seen, found)]

    def _seen(self, message: Any) -> Any:
        info = message.delivery_info
        given = info["exchange"], info["routing_key"], message.headers.get("number")
        return message.body, message.properties.get("priority"), *given

    def ack(self, at: int) -> None:
        if self.held:
            self.held.pop(at % len(self.held)).ack()

    def reject(self, at: int, requeue: bool) -> None:
        if self.held:
            self.held.pop(at % len(self.held)).reject(requeue=requeue)

    def declare(self, queue: str) -> Any:
        return tuple(self.channel.queue_declare(queue=queue))

    def declare_exchange(self, exchange: str) -> None:
        self.channel.exchange_declare(exchange, EXCHANGES[exchange])

    def bind(self, queue: str, exchange: str, key: str) -> None:
        self.channel.queue_bind(queue=queue, exchange=exchange, routing_key=key)

    def purge(self, queue: str) -> Any:
        return self.channel.queue_purge(queue)

    def look(self, queue: str) -> int:
        found: int = self.channel.queue_declare(queue=queue, passive=True).message_count
        return found

    def delete(self, queue: str, if_unused: bool, if_empty: bool) -> Any:
        return self.channel.queue_delete(queue, if_unused, if_empty)

    def limit(self, count: int) -> None:
        self._limit = count
        self.channel.basic_qos(0, count, False)

    def recover(self) -> None:
        self.channel.basic_recover(requeue=True)
        self.held.clear()

    def close_channel(self) -> None:
        self.channel.close()
        self.held.clear()
        self.channel, self._limit = self.connection.channel(), 0

    def close(self) -> None:
        self.connection.close()
        self.held.clear()
        self.connection = Connection(self.url)
        self.channel, self._limit = self.connection.channel(), 0


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=st.lists(steps, min_size=40, max_size=120))
def test_the_same_answers(plan: list[tuple[Any, ...]], server: Server) -> None:
    with server.client() as client:
        client.flushall()
    url = server.url.removesuffix("/0")
    stock, ours = Program(f"{url}/1"), Program(f"delayed+{url}/2")
    try:
        for step in plan:
            if stock.may_take(*step):
                assert ours.step(*step) == stock.step(*step), step
        for queue in QUEUES:
            assert ours.step("look", queue) == stock.step("look", queue)
    finally:
        stock.connection.close()
        ours.connection.close()
