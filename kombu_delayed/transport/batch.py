"""`Producer.batch()` of Kombu 5.7: many messages in few calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kombu.transport import redis as stock
from redis.exceptions import AskError, NoScriptError, ResponseError, TryAgainError

from ..connection.commands import pack
from ..connection.connection import ServerConnection
from ..errors import NotReplicated
from ..store.calls import instrumentation
from ..store.calls.caller import PLAIN
from ..store.calls.scripts import FIRST_KEY, by_sha, whole
from ..store.store import CALL_LIMIT, Entry, Store, chunks

#: The verb of the command that waits for replicas.
WAIT = "wait"

#: Gathered messages are sent when they have this many bytes, however few they are.
BATCH_BYTES = 8_000_000

#: A verb, for the receiver of the answer, and a command.
Sent = tuple[str, tuple[Any, ...]]


class Lane:
    """One connection of a pipeline.

    It does each command once, unless the server redirects it or has lost its script.
    """

    def __init__(
        self, server: ServerConnection, store: Store, on_answer: Callable[[Sent, Any], None]
    ) -> None:
        self._server = server
        self._store = store
        self._on_answer = on_answer
        self._connection: Any = None
        self.unconfirmed: deque[Sent] = deque()
        self._has_failed = False
        #: Scripts whose sources were sent: they are longer than most messages.
        self._sources: set[str] = set()

    def send(self, commands: list[Sent]) -> None:
        """Send commands."""
        if self._connection is None:
            self._connection = self._server.connect()
        else:
            self._server.refresh(self._connection, is_idle=not self.unconfirmed)
        packed = [pack(self._shortened(command)) for _, command in commands]
        self._connection.send_packed_command(packed, check_health=not self.unconfirmed)
        self.unconfirmed.extend(commands)

    def _shortened(self, command: tuple[Any, ...]) -> tuple[Any, ...]:
        if command[0] != "EVAL":
            return command
        if command[1] in self._sources:
            return by_sha(command)
        self._sources.add(command[1])
        return command

    def confirm(self, count: int) -> list[Exception]:
        """Read `count` answers; returns the errors among them. Raises connection errors."""
        errors: list[Exception] = []
        for _ in range(count):
            sent = self.unconfirmed.popleft()
            try:
                self._answered(sent, self._answer_to(sent[1]))
            except (ResponseError, NotReplicated) as error:
                errors.append(error)
        self._has_failed = self._has_failed or bool(errors)
        return errors

    def _answer_to(self, command: tuple[Any, ...]) -> Any:
        try:
            answer = self._connection.read_response()
            return self._store.sent_plain(command) if answer == PLAIN else answer
        except (AskError, NoScriptError, TryAgainError):  # and MovedError, which is an AskError
            return self._store.send(*command)

    def _answered(self, sent: Sent, answer: Any) -> None:
        if sent[0] == WAIT and self._store.replicas:
            self._store.replicas.check(answer)
        else:
            self._on_answer(sent, answer)

    def close(self) -> None:
        """Give the connection back to its pool."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self.unconfirmed or self._has_failed:  # the server may be a replica by now
            connection.disconnect()
        self._server.pool.release(connection)


class Pipeline:
    """Sends commands without waiting: the server works on them while the program continues.

    `on_answer` is called with the verb that a command was sent under and its answer; in order if
    there is one server.
    """

    def __init__(
        self, store: Store, on_answer: Callable[[str, Any], None] = lambda verb, answer: None
    ) -> None:
        self._store = store
        self._on_answer = on_answer
        self._lanes: dict[ServerConnection, Lane] = {}

    def send(self, commands: list[Sent], waits_for: str = "") -> None:
        """Send commands, each under a verb, and read the answers to earlier ones.

        Commands that are sent under a verb in `waits_for` wait for replicas.
        """
        before = {lane: len(lane.unconfirmed) for lane in self._lanes.values()}
        for server, part in self._by_server(commands).items():
            lane = self._lanes.setdefault(server, Lane(server, self._store, self._answered))
            if self._store.replicas and any(verb in waits_for for verb, _ in part):
                part.append((WAIT, self._store.replicas.command))
            lane.send(part)
        self._confirm(before)

    def _answered(self, sent: Sent, answer: Any) -> None:
        self._on_answer(sent[0], answer)

    def _by_server(self, commands: list[Sent]) -> dict[ServerConnection, list[Sent]]:
        found: dict[ServerConnection, list[Sent]] = {}
        for verb, command in commands:
            found.setdefault(self._store.run.to(command), []).append((verb, command))
        return found

    def confirm(self) -> None:
        """Read the answers to sent commands. Raises the first error among them."""
        self._confirm({lane: len(lane.unconfirmed) for lane in self._lanes.values()})

    def _confirm(self, counts: dict[Lane, int]) -> None:
        errors = [error for lane, count in counts.items() for error in lane.confirm(count)]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Give the connections back to their pools."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


class Outbox(Pipeline):
    """Replaces the batch's pipeline: gathers messages by queue, and sends them together."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        on_answer: Callable[[str, Any], None] = lambda verb, answer: None,
    ) -> None:
        super().__init__(store, on_answer)
        self._prefix = prefix
        #: First key of a command that schedules -> its queue.
        self._queues: dict[Any, str] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what was gathered."""
        self._queued: dict[tuple[str, str, int], list[Entry]] = {}
        self._fanout: list[tuple[str, str]] = []
        #: The approximate size of all that was gathered.
        self.size_bytes = 0

    def schedule(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """Gather a message with a due time."""
        self.size_bytes += len(entry.message)
        queue = self._store.shards.place(queue, entry.id)
        self._queued.setdefault(("schedule", queue, expires_ms), []).append(entry)

    def put(self, queue: str, entry: Entry, expires_ms: int) -> None:
        """Gather a message that is ready now."""
        self.size_bytes += len(entry.message)
        queue = self._store.shards.place(queue, entry.id)
        self._queued.setdefault(("publish", queue, expires_ms), []).append(entry)

    def publish(self, topic: str, payload: str) -> None:
        """Gather a fanout message."""
        self._fanout.append((self._prefix + topic, payload))

    def execute(self) -> None:
        """Send the gathered commands, and check that earlier ones have arrived."""
        commands = self._commands()
        self.reset()
        self.send(commands, waits_for="schedule publish")

    def _commands(self) -> list[Sent]:
        commands: list[Sent] = []
        for (verb, queue, expires_ms), entries in self._queued.items():
            call = self._store.schedule_call if verb == "schedule" else self._store.publish_call
            for part in chunks(entries):
                command = whole(*call(queue, part, expires_ms))
                self._queues[command[FIRST_KEY]] = queue
                commands.append((verb, command))
        for topic, payload in self._fanout:
            commands.append(("fanout", ("PUBLISH", topic, payload)))
        return commands

    def _answered(self, sent: Sent, answer: Any) -> None:
        verb, command = sent
        if verb == "schedule":
            queue = self._queues[command[FIRST_KEY]]
            answer = self._store.scheduled(queue, answer)
            if answer.delayed and (meter := instrumentation.current) is not None:
                meter.scheduled(queue, answer.delayed)
        super()._answered(sent, answer)


if hasattr(stock, "PublishBatch"):
    from kombu.exceptions import BatchPublishError

    class PublishBatch(stock.PublishBatch):
        """Kombu's batch with an outbox as its pipeline."""

        def __init__(self, channel: Any, max_size: int) -> None:
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
            """Send what was gathered. Called by the user or at the end, check that all arrived."""
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
