"""Which messages of a channel occupy slots of limits, and until when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kombu_delayed.message.ticket import Gate, id_in
from kombu_delayed.store.global_limits import is_pool

from ..outbox import Freed, Outbox
from .shared_slots import SharedSlots


class Slots:
    """Slots of messages: occupied until the ack or, if the task says so, until the task ends."""

    def __init__(self, outbox: Outbox) -> None:
        #: Tag of a message with slots -> its queue, and its record if it has slots of limits of the
        #: queue.
        self.of_messages: dict[int, tuple[str, bytes]] = {}
        #: The slots of global limits.
        self.shared = SharedSlots()
        #: Tags of messages whose slots belong to their tasks, which say when they end.
        self.of_tasks: set[int] = set()
        #: How many calls of `task_ended` have freed slots.
        self.ends = 0
        self._outbox = outbox

    def occupy(self, tag: int, queue: str, record: bytes, shared: dict[str, int]) -> None:
        """Note that a message was claimed that has slots until it is done with.

        `record` is empty if it has no slots of its queue's limits; `shared` has those of global
        limits.
        """
        if shared:
            self.shared.occupy(tag, queue, shared)
        if record or shared:
            self.of_messages[tag] = queue, record

    def keep(self, tag: int) -> bool:
        """Keep a message's slots until `task_ended`, even after its ack; False if it has none."""
        if tag not in self.of_messages:
            return False
        self.of_tasks.add(tag)
        return True

    def message_ended(self, tag: int) -> None:
        """Free the slots of a message that is not held any more, unless its task keeps them."""
        if tag not in self.of_tasks:
            self.free(tag)

    def task_ended(self, tag: int) -> bool:
        """Note that a message's task has ended; returns whether there are slots to give back."""
        if tag not in self.of_tasks or not self.free(tag):
            return False
        self.ends += 1
        return True

    def running(self, queue: str) -> Sequence[int | str]:
        """Tags of messages of a queue whose tasks have not ended and have slots.

        For a global limit, the names of these slots.
        """
        if is_pool(queue):
            return self.shared.running(queue)
        of_tasks = tuple(self.of_tasks)
        found = {tag: self.of_messages.get(tag, ("", b"")) for tag in of_tasks}
        return [tag for tag, (where, record) in found.items() if where == queue and record]

    def kept(self, queue: str, gate: Gate, but: Collection[int]) -> list[tuple[int, str, str]]:
        """Tags, ids and slots of a queue's messages that have slots of its limits, except `but`."""
        return [
            (tag, id_in(record), gate.own_slots(record))
            for tag, (where, record) in self.of_messages.copy().items()
            if where == queue and record and tag not in but
        ]

    def queues_of_tasks(self) -> set[str]:
        """The queues of messages whose tasks have not ended and have slots."""
        found = [self.of_messages.get(tag) for tag in tuple(self.of_tasks)]
        return {each[0] for each in found if each}

    def free(self, tag: int) -> bool:
        """Free a message's slots with the next flush; returns whether it had any."""
        queue, record = self.of_messages.pop(tag, (None, b""))
        self.of_tasks.discard(tag)
        if queue is None:
            return False
        self.shared.ended(tag)
        if record:
            self._outbox.free(queue, tag)
        return True

    def free_unheard(self, queue: str, tags: Iterable[int]) -> None:
        """Free the slots that messages of a lost answer may have, as these go back."""
        for tag in tags:
            self.of_messages.pop(tag, None)
            self.shared.ended(tag)
            self._outbox.freed.append(Freed(queue, tag))

    def take_over(self, tag: int) -> bool:
        """Let the caller free a message's slots; returns whether it has slots of its queue.

        The keeper's thread calls it, and gives back the slots of global limits afterwards.
        """
        self.of_tasks.discard(tag)
        self.shared.take_over(tag)
        return bool(self.of_messages.pop(tag, ("", b""))[1])

    def forget(self) -> None:
        """Forget all slots, because they belong to others now."""
        self.of_messages.clear()
        self.of_tasks.clear()
        self.shared.forget()
