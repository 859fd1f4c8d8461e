"""Moves messages from this transport to the stock one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kombu.utils.json import loads

from ..errors import MessageError
from ..inspection.ready.lists import ReadyLists
from ..message.compressing import MARK
from ..message.envelope import UNREADABLE_BODY, check_task, due, open_envelope, open_kept
from ..message.packing import unpack
from ..store.calls.shards import is_shard, queue_of
from ..store.dead_letters import DeadLetter
from ..store.store import CALL_LIMIT
from .migration import Entry, Migration, text_of

if TYPE_CHECKING:
    from ..transport.channel.channel import Channel


class ToStock(Migration):
    """Moves the backlog, messages of dead consumers, and dead letters to the stock transport."""

    def __init__(
        self,
        channel: Channel,
        queues: Iterable[str] = (),
        *,
        force: bool = False,
        dead: bool = False,
        dry: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(channel, queues, dry=dry)
        self.force = force
        self.dead = dead

    def blockers(self) -> list[str]:
        """Return running consumers of this transport: they would put messages into the backlog."""
        return [
            f"consumers of queue {queue!r} run on this transport: {len(live)} "
            f"({', '.join(sorted(live)[:5])}). They would put the messages back into the backlog. "
            "Stop them; a killed one counts until its lease ends"
            for queue in self.queues()
            if (live := self._consumers(queue)[0])
        ]

    def _consumers(self, queue: str) -> tuple[set[str], set[str]]:
        """Return the consumers with a valid lease, and those with an expired one."""
        now_ms = self.store.now_ms()
        found = self.client.zrange(self.store.keys(queue).consumers, 0, -1, withscores=True)
        live = {name.decode() for name, end_ms in found if end_ms > now_ms}
        return live, {name.decode() for name, _ in found} - live

    def queues(self) -> list[str]:
        """Return those of the base class, and queues with other messages to move."""
        names = ("unacked:*", "dictionaries", *(("dead",) if self.dead else ()))
        found = {queue for name in names for queue, _ in self._scan(name)}
        found.update(super().queues())
        queues = {queue_of(name) for name in found}  # and shards that the server does not know of
        return sorted(found.union(*map(self.store.shards.all, queues)))

    def steps(self) -> Iterator[int]:
        """Move messages of dead consumers, then the backlog in due order, then dead letters."""
        holders = list(self._scan("unacked:*"))
        for queue in self.queues():
            live, dead = self._consumers(queue)
            dead |= {name for holder, name in holders if holder == queue} - live
            for consumer in sorted(dead):
                yield self._reclaim(queue, consumer)
            yield from self._backlog_steps(queue)
            if self.dead:
                yield from self._dead_steps(queue)
            yield from self._expand_steps(queue)
            yield from self._gather_steps(queue)

    def _reclaim(self, queue: str, consumer: str) -> int:
        if self.dry:
            count = self.client.hlen(self.store.keys(queue).unacked(consumer))
        else:
            count = self.store.leases.reclaim(queue, consumer)
        self.report.count(queue, "unacked", "ready", count)
        return int(count)

    def _backlog_steps(self, queue: str) -> Iterator[int]:
        keys = self.store.keys(queue)
        for name in [*self.client.zrange(keys.partitions, 0, -1), b"waiting"]:
            key, stays = keys.delayed + name.decode(), 0
            while page := self.client.zrange(key, stays, stays + CALL_LIMIT - 1, withscores=True):
                self._hand_back(queue, page)
                stays += self._still_there(key, page)
                yield len(page)
        if not self.dry:
            self.store.clear(queue)

    def _still_there(self, key: str, page: Sequence[tuple[bytes, float]]) -> int:
        """Count the messages that still have their place: others may cancel or move some."""
        scores = self.client.zmscore(key, [member for member, _ in page])
        return sum(score == now for (_, score), now in zip(page, scores, strict=True))

    def _hand_back(self, queue: str, page: Sequence[tuple[bytes, float]]) -> None:
        """Make messages of the backlog ready."""
        now_ms, messages = self.store.now_ms(), self.store.keys(queue).messages
        members = [member for member, _ in page]
        records = self.store.ask("records", queue, hash=messages, fields=members)
        entries = []
        for (member, score), record in zip(page, records, strict=True):
            if record is None:
                continue
            kept = unpack(member, record)
            text = self.store.readable(queue, kept)
            reason = self._refusal(text, int(score), now_ms)
            if reason:
                self.report.leave(messages, text_of(member), reason)
            else:
                # A compressed message gets the text that stock workers can read.
                entries.append(Entry(member, "", int(score), b"" if text is kept else text))
        moved = len(entries)
        if entries and not self.dry:
            ((_, moved),) = self._transaction([self._call(queue, "delayed", entries)])
        self.report.count(queue, "delayed", "ready", moved)

    def _dead_steps(self, queue: str) -> Iterator[int]:
        """Make dead letters ready, the oldest first: the stock transport has none."""
        dead, last = self.store.dead, None
        while page := dead.page(queue, last, CALL_LIMIT):
            last, ids, going = page[-1], [id for _, id in page], []
            for letter in dead.letters(queue, ids):
                if reason := self._refusal_of_letter(letter):
                    self.report.leave(self.store.keys(queue).dead, letter.id, reason)
                else:
                    going.append(letter.id)
            moved = len(going) if self.dry else dead.replay(queue, going)
            self.report.count(queue, "dead", "ready", moved)
            yield len(ids)

    def _refusal_of_letter(self, letter: DeadLetter) -> str:
        """Return why a stock worker would stop on it or drop it; empty if it would not."""
        try:
            check_task(open_envelope(letter.message, 0).payload)
            message = self.channel.Message(loads(letter.message), channel=self.channel)
            _ = message.delivery_tag, message.delivery_info["exchange"]
            _ = message.delivery_info["routing_key"]
        except MessageError as error:
            return f"a stock worker would stop on it: {error}"
        except Exception as error:  # bad base64, a missing member, an unknown type
            return f"a stock worker would stop on it: {error!r}"
        if letter.reason.startswith(UNREADABLE_BODY) and not self.force:
            return f"a stock worker would drop it: {letter.reason}"
        return ""

    def _expand_steps(self, queue: str) -> Iterator[int]:
        """Replace ready messages by their uncompressed texts.

        Each stays in its list all the time, in one form or the other.
        """
        lists = ReadyLists(self.store, queue)
        for step in lists.steps:
            start, has_more = 0, True
            while has_more:
                looked_at, has_more, page = lists.page(step, start, [MARK])
                found = [each for each in page if each.compressed]
                count = len(found) if self.dry else lists.expand(found)
                self.report.count(queue, "compressed", "ready", count)
                start += looked_at
                yield 0

    def _gather_steps(self, shard: str) -> Iterator[int]:
        """Move a shard's ready messages to its queue's lists."""
        if not is_shard(shard):
            return
        keys, targets = self.store.keys(shard), self.store.keys(queue_of(shard)).ready
        for source, target in zip(keys.ready, targets, strict=True):
            left = self.client.llen(source)
            while left > 0:
                count = min(left, CALL_LIMIT)
                if not self.dry:
                    with self.client.pipeline(transaction=True) as pipeline:
                        for _ in range(count):
                            pipeline.lmove(source, target, "RIGHT", "LEFT")
                        pipeline.execute()
                self.report.count(shard, "ready", "ready", count)
                left -= count
                yield count

    def _refusal(self, record: bytes, due_ms: int, now_ms: int) -> str:
        try:
            envelope = open_envelope(open_kept(record).message, 0)
        except MessageError as error:
            return str(error)
        when = due(envelope.payload)
        if self.force or due_ms <= now_ms or (when and when.at_ms == due_ms):
            return ""
        return "its due time is not in an eta header, so a stock worker would run it at once"
