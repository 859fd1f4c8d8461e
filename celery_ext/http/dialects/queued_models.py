"""What the dialect `delayedqueue` takes and gives."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ..api.fields import Id, Name, check_plain
from .given import NO_TRUTH, Given, Length
from .scores import LIMIT
from .topics import topic_in

Score = Annotated[int, Field(ge=-LIMIT, le=LIMIT), NO_TRUTH]

_TOPIC = re.compile(r"[^\x00-\x1f\x7f,]{1,300}")


class QueuedId(Given):
    """The id and the namespace of a task."""

    id: Id
    namespace: Name = "default"


class StatusQuery(Given):
    """The same, where the body does not name it."""

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

    Consumers subscribe to the topic that its field `topics` names, or to `default`.
    """

    delay: Length = "0s"
    score: Score = 0
    payload: Any


class QueuedChange(_WithPayload):
    """What is to be another one; what is left out stays."""

    delay: Length | None = None
    score: Score | None = None


class QueuedState(BaseModel):
    """A task and how far it is; `delay` is what is left of it."""

    id: str
    namespace: str
    status: str
    delay: str | None = None
    score: int | None = None
    payload: Any = None


class PollQuery(Given):
    """Which topics, separated by commas; how long to wait, and how long a task is the caller's."""

    namespace: Name = "default"
    topics: Name = "default"
    wait: Length = "20s"
    lease: Length = "60s"
    max: int = Field(1, ge=1, le=100)


class PolledTask(QueuedState):
    """A task that is the caller's until its lease ends; `ack` says that it is done."""

    ack: str


class Polled(BaseModel):
    """Tasks that are due; none: the time is over."""

    tasks: list[PolledTask]


class Acks(Given):
    """What `poll` gave."""

    acks: list[str] = Field(min_length=1, max_length=100)


class Acked(BaseModel):
    """How many were still the caller's."""

    acked: int
