"""`Producer.batch()` of Kombu 5.7: many messages in few calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.transport import redis as stock
from redis.exceptions import ResponseError

from .scripts import Script
from .store import CALL_LIMIT, Entry, Store, chunks
from .wire import pack

if TYPE_CHECKING:
    from .channel import Channel


class Pipeline:
    """Sends commands without waiting: the server works on them while the program goes on.

    `on_answer` is called with the verb that a command was sent under and its answer, in order.
    """

    def __init__(
        self, store: Store, on_answer: Callable[[str, Any], None] = lambda verb, answer: None
    ) -> None:
        self._pool = store.client.connection_pool
        self._on_answer = on_answer
        self._connection: Any = None
        self._unconfirmed: deque[str] = deque()

    def send(self, commands: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Send commands, each under a verb, and read the answers to what was sent before."""
        if self._connection is None:
            self._connection = self._pool.get_connection()
        packed = [pack(command) for _, command in commands]
        self._connection.send_packed_command(packed, check_health=not self._unconfirmed)
        before = len(self._unconfirmed)
        self._unconfirmed.extend(verb for verb, _ in commands)
        self._confirm(before)

    def confirm(self) -> None:
        """Read the answers to what was sent. Raises the first error among them."""
        self._confirm(len(self._unconfirmed))

    def _confirm(self, count: int) -> None:
        errors = []
        for _ in range(count):
            verb = self._unconfirmed.popleft()
            try:
                self._on_answer(verb, self._connection.read_response())
            except ResponseError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Give the connection back to its pool."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._unconfirmed:
            connection.disconnect()
        self._unconfirmed.clear()
        self._pool.release(connection)


def whole(move: Script, given: dict[str, Any]) -> tuple[Any, ...]:
    """The command that runs a script, whole: nobody waits for a server that has lost it."""
    return ("EVAL", move.source, *move.pack(given))


class Outbox(Pipeline):
    """Stands in for the batch's pipeline: gathers messages by queue, sends them together."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        on_answer: Callable[[str, Any], None] = lambda verb, answer: None,
    ) -> None:
        super().__init__(store, on_answer)
        self._store = store
        self._prefix = prefix
        self.reset()

    def reset(self) -> None:
        """Forget what was gathered."""
        self._queued: dict[tuple[str, str, int], list[Entry]] = {}
        self._fanout: list[tuple[str, str]] = []

    def schedule(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """A message with a due time."""
        queue = self._store.shards.home(queue, entry.id)
        self._queued.setdefault(("schedule", queue, expires_ms), []).append(entry)

    def put(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """A message for now."""
        queue = self._store.shards.home(queue, entry.id)
        self._queued.setdefault(("publish", queue, expires_ms), []).append(entry)

    def publish(self, topic: str, payload: str) -> None:
        """A fanout message."""
        self._fanout.append((self._prefix + topic, payload))

    def execute(self) -> None:
        """Send what was gathered, and see that what was sent before has arrived."""
        commands = self._commands()
        self.reset()
        self.send(commands)

    def _commands(self) -> list[tuple[str, tuple[Any, ...]]]:
        commands: list[tuple[str, tuple[Any, ...]]] = []
        for (verb, queue, expires_ms), entries in self._queued.items():
            call = self._store.schedule_call if verb == "schedule" else self._store.publish_call
            for part in chunks(entries):
                commands.append((verb, whole(*call(queue, part, expires_ms))))
        for topic, payload in self._fanout:
            commands.append(("fanout", ("PUBLISH", topic, payload)))
        return commands


if hasattr(stock, "PublishBatch"):
    from kombu.exceptions import BatchPublishError

    class PublishBatch(stock.PublishBatch):
        """Kombu's batch with an outbox for a pipeline."""

        def __init__(self, channel: Channel, max_size: int) -> None:
            super().__init__(channel, min(max_size, CALL_LIMIT))
            self._confirms = True
            self.pipeline: Any = Outbox(channel.store, channel.global_keyprefix)
            self._stack.callback(self.pipeline.close)

        def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
            """Route one message; a full outbox is sent and confirmed with the next one."""
            self._confirms = False
            try:
                return super().publish(message, **kwargs)
            finally:
                self._confirms = True

        def flush(self) -> None:
            """Send what was gathered; called by the user or at the end, see that all arrived."""
            super().flush()
            if not self._confirms:
                return
            try:
                self.pipeline.confirm()
            except Exception as error:
                self._failed = error
                raise BatchPublishError(
                    "Redis publish batch failed; delivery is uncertain"
                ) from error
