"""Compares what a consumer holds with what its server says, which may have lost data or gone back.

A server that was started again from an older snapshot says that messages are held which were
acknowledged since, and one that has lost its data has lost the slots of running tasks.
"""

from __future__ import annotations

from collections.abc import Collection

from kombu_delayed.connection.native import get_logger

from ..outbox import RELEASE, Done, Freed
from ..policy.admission import Gatekeeper
from ..session import Session

logger = get_logger(__name__)


def compare(
    session: Session, gates: Gatekeeper, queues: Collection[str], claimed: Collection[int]
) -> None:
    """Correct the server, of queues of which every answer has arrived.

    `claimed` are the tags of what was not handed out yet. The outbox has the corrections of what is
    not held any more.
    """
    qos, leases, consumer = session.qos, session.store.leases, session.lease.consumer
    last_tag, before = session.tag, qos.known_tags()
    found = leases.tags(queues, consumer)
    known = {*claimed, *before, *qos.known_tags()}  # from any thread, acks may have come meanwhile
    for queue, (tags, with_slots) in found.items():
        if stale := sorted(tag for tag in tags - known if tag <= last_tag):
            logger.warning(
                "The server has older data: %d messages of queue %r that this consumer has "
                "acknowledged run again",
                len(stale),
                queue,
            )
            qos.outbox.done.extend(Done(RELEASE, queue, tag, "") for tag in stale)
        ended = (tag for tag in with_slots - known if tag <= last_tag)
        qos.outbox.freed.extend(Freed(queue, tag) for tag in ended)
        gate = gates.gate(queue)
        if gate is not None and (lost := qos.slots.kept(queue, gate, with_slots)):
            leases.keep_slots(queue, consumer, lost)
            # Of what has ended meanwhile they are given back once more.
            qos.outbox.freed.extend(
                Freed(queue, tag) for tag, *_ in lost if tag not in qos.slots.of_messages
            )
