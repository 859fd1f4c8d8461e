"""Requests and answers of the dialect `delayedqueue`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ..api.fields import Id, Name, check_plain
from .claims import LIMIT
from .given import NO_TRUTH, Given, Length
from .topics import topic_in

Score = Annotated[int, Field(ge=-LIMIT, le=LIMIT), NO_TRUTH]

_TOPIC = re.compile(r"[^\x00-\x1f\x7f,]{1,300}")


class QueuedId(Given):
    """The id and the namespace of a task."""

    id: Id
    namespace: Name = "default"


class StatusQuery(Given):
    """The id and the namespace of a task, if the body does not name it."""

    id: Id | None = None
    namespace: Name = "default"


class _WithPayload(QueuedId):
    payload: Any = None

    @model_validator(mode="after")
    def _is_usable(self) -> _WithPayload:
        check_plain(self, "payload")
        name = topic_in(self.payload)
        if not _TOPIC.fullmatch(name) or not name.isprintable():
            raise ValueError("payload.topics: give one name, without commas and control characters")
        return self


class QueuedTask(_WithPayload):
    """A task; the smaller its score, the more urgent. A payload is any JSON.

    Consumers subscribe to the topic that the payload's field `topics` names, or to `default`.
    """

    delay: Length = "0s"
    score: Score = 0
    payload: Any


class QueuedChange(_WithPayload):
    """The new values of a task; values that are left out stay."""

    delay: Length | None = None
    score: Score | None = None


class QueuedState(BaseModel):
    """A task and its status; `delay` is the time that is left."""

    id: str
    namespace: str
    status: str
    delay: str | None = None
    score: int | None = None
    payload: Any = None


class PollQuery(Given):
    """The topics, separated by commas, how long to wait, and how long the caller keeps a task."""

    namespace: Name = "default"
    topics: Name = "default"
    wait: Length = "20s"
    lease: Length = "60s"
    max: int = Field(1, ge=1, le=100)


class PolledTask(QueuedState):
    """A task that belongs to the caller until its lease expires; `ack` acknowledges it."""

    ack: str


class Polled(BaseModel):
    """Tasks that are due; empty if the waiting time is over."""

    tasks: list[PolledTask]


class Acks(Given):
    """The `ack` texts that `poll` gave."""

    acks: list[str] = Field(min_length=1, max_length=100)


class Acked(BaseModel):
    """How many tasks still belonged to the caller."""

    acked: int
