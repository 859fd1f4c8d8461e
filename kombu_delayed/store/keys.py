"""Every Redis key of this project is built here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..message.envelope import step_char

SEPARATOR = "\x06\x16"

#: The answer of TYPE for a key, by how its description begins.
_TYPES = {"Hash": "hash", "Sorted set": "zset", "Stream": "stream", "String": "string"}


class _Key(cached_property[str]):
    """A key of a queue, with a description. It has the name of its attribute, or `name`."""

    def __init__(self, holds: str, name: str = "") -> None:
        def key(keys: QueueKeys) -> str:
            return keys._start + (name or str(self.attrname).replace("_", "-"))

        key.__doc__ = holds
        super().__init__(key)
        #: The answer of TYPE; None for a prefix or a key that never exists.
        self.type = next((each for word, each in _TYPES.items() if holds.startswith(word)), None)


@dataclass(frozen=True)
class QueueKeys:
    """The keys of one queue, each with the global key prefix in front.

    Kombu's ready list is named `queue`, all other keys `{queue}:…`. On a Cluster, where all keys
    must be in one slot, the names of the lists have braces too, and `tag` is the text in braces.
    """

    queue: str
    prefix: str = ""
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)
    separator: str = SEPARATOR
    tag: str = ""

    @cached_property
    def _start(self) -> str:
        return f"{self.prefix}{{{self.tag or self.queue}}}:"

    def ready_list(self, step: int) -> str:
        """Kombu's list for a priority step; step 0 is the queue's own name."""
        suffix = f"{self.separator}{step}" if step else ""
        name = f"{{{self.tag}}}" if self.tag else self.queue
        return f"{self.prefix}{name}{suffix}"

    @cached_property
    def ready(self) -> tuple[str, ...]:
        """One list for each priority step, the most urgent first."""
        return tuple(self.ready_list(step) for step in self.priority_steps)

    @cached_property
    def steps(self) -> str:
        """The priority steps as one character each, in the order of `ready`."""
        return "".join(map(step_char, self.priority_steps))

    # A script without it could start on a node that has only some of its keys, and fail half way.
    absent = _Key(
        "Never exists. While a slot is on its way, a node refuses a script that names it."
    )
    delayed = _Key(
        "The prefix of the keys of partitions; each is a sorted set id -> due_ms.", "delayed:"
    )
    partitions = _Key("Sorted set partition -> lower bound of its due times.")
    urgent = _Key(
        "Sorted set id -> priority step and due time, of messages more urgent than others.",
        "partitions:urgent",
    )
    waiting = _Key(
        "Sorted set id -> due_ms, of due messages that wait at the gate.", "delayed:waiting"
    )
    gate = _Key("The prefix of the keys of the gate.", "gate:")
    policies = _Key("Hash version, text, by, at: the policies that its consumers apply, as JSON.")
    overrides = _Key(
        'Hash limit -> "slots ms burst until JSON": numbers set at run time, by whom and why.',
        "gate:overrides",
    )

    def slots(self, consumer: str) -> str:
        """Hash tag -> the slots of this consumer's message."""
        return f"{self.gate}slots:{consumer}"

    messages = _Key(
        "Hash id -> step + due time in ms + message, of delayed messages. Packed in buckets."
    )
    dictionaries = _Key(
        "Hash version -> dictionary of compressed messages; and which one is current."
    )
    duplicates = _Key("Hash id -> number of delayed messages that share it, if more than one.")
    unique = _Key("Hash unique key -> id of the delayed message with this key.")
    unique_due = _Key("Sorted set unique key -> last due time of that message.")
    unique_held = _Key("Hash unique key -> id of the task that holds it until it has ended.")
    unique_until = _Key("Sorted set unique key -> when that task loses it at the latest.")
    moved = _Key("Sorted set id -> when it moved to another place in the backlog, for an hour.")
    wake = _Key("Sorted set of wake tokens, on a Cluster with waiting consumers -> when to claim.")
    armed = _Key(
        'String "due_ms consumer": the consumer that will claim then; "*": half a second later.'
    )
    expires = _Key("String: after how many ms without use the queue expires, if it does.")
    paused = _Key('String "from until JSON": the pause of the queue, by whom and why.')
    consumers = _Key("Sorted set consumer -> end of its lease.")
    granted_by = _Key("String: run id of the server by whose clock the leases in `consumers` end.")

    def unacked(self, consumer: str) -> str:
        """Hash tag -> priority step + message, of one consumer."""
        return f"{self._start}unacked:{consumer}"

    expectations = _Key("Hash name -> JSON: an expectation, or how it ended.")
    expectations_until = _Key("Sorted set name -> when that is forgotten.")
    answers = _Key("Hash name -> JSON: an answer that no task expects yet.")
    answers_until = _Key("Sorted set name -> when that is forgotten.")

    def reclaimed(self, consumer: str) -> str:
        """Exists for a day if messages of this consumer were given to other consumers."""
        return f"{self._start}reclaimed:{consumer}"

    def held(self, consumer: str) -> str:
        """Sorted set of the tags in a large unacked hash, while they are returned."""
        return f"{self._start}held:{consumer}"

    dead = _Key("Sorted set id -> when it became a dead letter.")
    dead_messages = _Key(
        "Hash id -> priority step + message, of the dead letters. Packed in buckets."
    )
    dead_reasons = _Key(
        "Hash id -> JSON: why it became a dead letter, and its last consumer. In buckets."
    )
    events = _Key("Stream of lifecycle events.")
    outcomes = _Key(
        "The prefix of the keys of outcomes: hashes id -> text, and sorted sets of ids.",
        "outcomes:",
    )
    latest = _Key("Sorted set key -> its latest due time, for policies.")

    def job(self, job_id: str) -> str:
        """Hash id -> what a job did with it; counts of runs and attempts; the number of shards."""
        return f"{self._start}job:{job_id}"

    def job_slice(self, job_id: str, number: str) -> str:
        """Hash id -> the same, of a job of over 512 ids: one of 4,096, by the SHA-1 of the id."""
        return f"{self._start}job-slice:{number}:{job_id}"

    ledgers_until = _Key("Sorted set key of a ledger -> when it expires.")


def types_of(keys: QueueKeys) -> dict[str, str]:
    """The expected answer of TYPE for each key that a queue has exactly once."""
    named = [(name, key.type) for name, key in vars(QueueKeys).items() if isinstance(key, _Key)]
    found = {getattr(keys, name): type for name, type in named if type is not None}
    return found | dict.fromkeys(keys.ready, "list")


def job_report(job_id: str, prefix: str = "") -> str:
    """String: the report of a job's last run, as JSON."""
    return f"{prefix}kombu-delayed-job:{job_id}"


def job_state(ledger: str, prefix: str = "") -> str:
    """Hash: the description and progress of a job."""
    return f"{prefix}kombu-delayed-job:{ledger}:state"


def jobs(prefix: str = "") -> str:
    """Sorted set id of a job -> when it started, in ms, of the last 1,000 jobs."""
    return f"{prefix}kombu-delayed-jobs"


def job_shards(ledger: str, prefix: str = "") -> str:
    """Hash queue -> over how many shards a job spreads it, of jobs of version 0.1."""
    return f"{prefix}kombu-delayed-job:{ledger}:shards"


def job_pace(ledger: str, prefix: str = "") -> str:
    """String: until when writers of a job with a rate must wait, and when it was noted, in ms."""
    return f"{prefix}kombu-delayed-job:{ledger}:pace"


def archive_writer(path_digest: str, prefix: str = "") -> str:
    """String: the job that writes the archive of lifecycle events at a path."""
    return f"{prefix}kombu-delayed-archive:{path_digest}"


def format_version(prefix: str = "") -> str:
    """String: the version of the format of all these keys, as "major.minor"."""
    return f"{prefix}kombu-delayed:format"


def shard_counts(prefix: str = "") -> str:
    """Hash queue -> its highest number of shards, if more than one."""
    return f"{prefix}kombu-delayed-shards"


def bindings(exchange: str, prefix: str = "") -> str:
    """Set of an exchange's bindings, on a Cluster: in the slot of a queue of the same name."""
    return f"{prefix}_kombu.binding.{{{exchange}}}"


def lasting_bindings(exchange: str, prefix: str = "") -> str:
    """Set of those among an exchange's bindings that do not expire, on a Cluster."""
    return f"{prefix}_kombu.binding_permanent.{{{exchange}}}"


def shard_count(queue: str, prefix: str = "") -> str:
    """Hash: the same for this one queue, on a Cluster."""
    return f"{prefix}{{{queue}}}:shards"


def revoked_tasks(prefix: str = "") -> str:
    """Sorted set id of a revoked task -> when it was revoked, in µs, of the last 50,000."""
    return f"{prefix}kombu-delayed-revoked"


def http_tokens(prefix: str = "") -> str:
    """Hash id of a token of the HTTP API -> JSON: the hash of its secret, its permissions."""
    return f"{prefix}kombu-delayed-http:tokens"


def http_session(id: str, prefix: str = "") -> str:
    """String, expiring: the token of a login to the dashboard, by the hash of its secret."""
    return f"{prefix}kombu-delayed-http:session:{id}"


def http_form(id: str, prefix: str = "") -> str:
    """String, expiring: marks a submitted form of the dashboard, so that it is applied once."""
    return f"{prefix}kombu-delayed-http:form:{id}"


def http_cursors(prefix: str = "") -> str:
    """String: the key to the cursors of tokens of the HTTP API that are for tenants."""
    return f"{prefix}kombu-delayed-http:cursors"


def http_host(host: str, prefix: str = "") -> str:
    """Sorted set id of an HTTP job that is calling a host -> when its slot expires."""
    return f"{prefix}kombu-delayed-http:host:{{{host}}}"


def http_host_worker(host: str, worker: str, prefix: str = "") -> str:
    """Sorted set, like that of the host: the slots that one worker has taken."""
    return f"{http_host(host, prefix)}:worker:{worker}"


def http_host_timeouts(host: str, prefix: str = "") -> str:
    """String, expiring: the number of consecutive callbacks to a host that timed out."""
    return f"{http_host(host, prefix)}:timeouts"


def http_topics(namespace: str, prefix: str = "") -> str:
    """Set of the topics of a namespace, written by servers of version 0.1."""
    return f"{prefix}kombu-delayed-http:topics:{namespace}"


def http_task(namespace: str, id: str, prefix: str = "") -> str:
    """String, expiring: the topic of a task of a namespace that was sent over HTTP."""
    return f"{prefix}kombu-delayed-http:task:{namespace}\x1f{id}"


def literal(text: str) -> str:
    """Text as a pattern of SCAN that matches nothing else."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


#: The part after `{queue}:` in the names of keys, up to the next colon.
_ENDINGS = {"unacked", "reclaimed", "held", "job", "job-slice"} | {
    getattr(QueueKeys(""), name).removeprefix("{}:").partition(":")[0]
    for name, key in vars(QueueKeys).items()
    if isinstance(key, _Key)
}


def is_taken(queue: str) -> bool:
    """Whether the list of a queue with this name would be another key of this project or Kombu."""
    if queue.startswith("{"):
        return any(each.partition(":")[0] in _ENDINGS for each in queue.split("}:")[1:])
    return queue.startswith(("kombu-delayed-", "kombu-delayed:", "_kombu.binding"))
