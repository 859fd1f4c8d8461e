"""Compares what a consumer holds with its server, which may have lost data or have older data.

A server that was restarted from an older snapshot says that messages are held that were
acknowledged since. A server that has lost its data has lost the slots of running tasks.
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
    """Correct the server for queues of which every answer has arrived.

    `claimed` has the tags of messages that were not handed out, or that were taken back since.
    Corrections for messages that are not held any more go into the outbox.
    """
    qos, leases, consumer = session.qos, session.store.leases, session.lease.consumer
    last_tag, before = session.tag, qos.known_tags()
    found = leases.tags(queues, consumer)
    known = {*claimed, *before, *qos.known_tags()}  # any thread may have acked meanwhile
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
            # Slots of tasks that have ended meanwhile are freed once more.
            qos.outbox.freed.extend(
                Freed(queue, tag) for tag, *_ in lost if tag not in qos.slots.of_messages
            )
