"""Where tasks of the dialect `delayedqueue` are: a queue for each namespace and topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu_delayed.store.keys import http_task, http_topics
from kombu_delayed.store.store import Store

from ..service.create_once import KEPT_SECONDS

#: Prefixes of the queues. The second one is for namespaces with dots, which are quoted in it.
PREFIX, QUOTED_PREFIX = "http.", "http:"


class Topic(NamedTuple):
    """A topic of a namespace."""

    namespace: str
    name: str

    @property
    def queue(self) -> str:
        """The topic's queue, which no other topic has or had in version 0.1."""
        if "." not in self.namespace:
            return f"{PREFIX}{self.namespace}.{self.name}"
        quoted = self.namespace.replace("%", "%25").replace(".", "%2E")
        return f"{QUOTED_PREFIX}{quoted}.{self.name}"

    @property
    def old_queue(self) -> str | None:
        """The queue in version 0.1 if it was another one. Other topics may use it, too."""
        return f"{PREFIX}{self.namespace}.{self.name}" if "." in self.namespace else None

    @property
    def queues(self) -> list[str]:
        """All queues of the topic, the present one first."""
        return [self.queue] if self.old_queue is None else [self.queue, self.old_queue]


def topic_in(payload: Any) -> str:
    """The topic that a payload names, or `default`. Like Go, it accepts the field in any case."""
    if isinstance(payload, Mapping):
        for name in ("topics", *payload):
            if name.lower() == "topics" and name in payload:
                return _name(payload[name]) or "default"
    return "default"


def _name(topic: Any) -> str:
    if topic is None or (isinstance(topic, (str, int)) and not isinstance(topic, bool)):
        return "" if topic is None else str(topic)
    raise ValueError("payload.topics: give the name of one topic as text")


def owner_of(queue: str, job: Mapping[str, Any]) -> Topic | None:
    """The topic of a task in a queue; None: not sent through the dialect, or changed since."""
    if "payload" not in job:
        return None
    try:
        name = topic_in(job["payload"])
    except ValueError:
        return None
    namespace = job.get("namespace")
    if namespace is None:  # version 0.1
        namespace = queue[len(PREFIX) :].removesuffix(f".{name}")
        if queue.startswith(QUOTED_PREFIX):
            namespace = namespace.replace("%2E", ".").replace("%25", "%")
    return Topic(str(namespace), name)


class Index:
    """Finds the topic of a task by its id, until a day after it was due."""

    def __init__(self, store: Store) -> None:
        self._run, self._prefix = store.run, store.keys("").prefix

    def _key(self, namespace: str, id: str) -> str:
        return http_task(namespace, id, self._prefix)

    def note(self, namespace: str, id: str, topic: str, delay_seconds: float) -> None:
        """Remember the topic of a task, an hour longer than its queue remembers the id."""
        seconds = int(delay_seconds) + KEPT_SECONDS + 3_600
        self._run("SET", self._key(namespace, id), topic, "EX", seconds)

    def find(self, namespace: str, id: str) -> Topic | None:
        """The topic that a task was sent to; None: unknown."""
        found = self._run("GET", self._key(namespace, id))
        return None if found is None else Topic(namespace, found.decode(errors="replace"))

    def topics(self, namespace: str, id: str) -> list[Topic]:
        """The topics that may have a task: the known one, or all that version 0.1 has used."""
        if (known := self.find(namespace, id)) is not None:
            return [known]
        found = self._run("SMEMBERS", http_topics(namespace, self._prefix))
        return [Topic(namespace, name.decode(errors="replace")) for name in sorted(found)]
