"""Every Redis key of this project is built here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..message.envelope import step_char

SEPARATOR = "\x06\x16"


@dataclass(frozen=True)
class QueueKeys:
    """The keys of one queue, with the global key prefix in front of each.

    Kombu's ready list is named `queue`, everything else `{queue}:…`. On a Cluster, where all must
    be in one slot, the lists are `{queue}` too; what is in braces there is given as `tag`.
    """

    queue: str
    prefix: str = ""
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)
    separator: str = SEPARATOR
    tag: str = ""

    @cached_property
    def _start(self) -> str:
        return f"{self.prefix}{{{self.tag or self.queue}}}:"

    def _tagged(self, name: str) -> str:
        return self._start + name

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

    @cached_property
    def delayed(self) -> str:
        """What the keys of the partitions begin with; each is a sorted set id -> due_ms."""
        return self._tagged("delayed:")

    @cached_property
    def partitions(self) -> str:
        """Sorted set partition -> lower bound of its due times."""
        return self._tagged("partitions")

    @cached_property
    def urgent(self) -> str:
        """Sorted set id -> priority step and due time, of what is more urgent than others."""
        return self._tagged("partitions:urgent")

    @cached_property
    def waiting(self) -> str:
        """Sorted set id -> due_ms, of what is due and waits at the gate."""
        return self._tagged("delayed:waiting")

    @cached_property
    def gate(self) -> str:
        """What the keys of the gate begin with."""
        return self._tagged("gate:")

    @cached_property
    def policies(self) -> str:
        """Hash version, text, by, at: the policies that its consumers go by, as JSON."""
        return self._tagged("policies")

    @cached_property
    def overrides(self) -> str:
        """Hash limit -> "slots ms burst until JSON": what was set at run time, by whom and why."""
        return f"{self.gate}overrides"

    def slots(self, consumer: str) -> str:
        """Hash tag -> the slots that this consumer's message has."""
        return f"{self.gate}slots:{consumer}"

    @cached_property
    def messages(self) -> str:
        """Hash id -> step + due time in ms + message, of what is delayed. Packed in buckets."""
        return self._tagged("messages")

    @cached_property
    def dictionaries(self) -> str:
        """Hash version -> a dictionary that messages are compressed with; which one is current."""
        return self._tagged("dictionaries")

    @cached_property
    def duplicates(self) -> str:
        """Hash id -> how many delayed messages share it; ids that are unique are not in it."""
        return self._tagged("duplicates")

    @cached_property
    def unique(self) -> str:
        """Hash unique key -> id of the delayed message that has it."""
        return self._tagged("unique")

    @cached_property
    def unique_due(self) -> str:
        """Sorted set unique key -> when that message was due last."""
        return self._tagged("unique-due")

    @cached_property
    def unique_held(self) -> str:
        """Hash unique key -> id of the task that holds it until it has ended."""
        return self._tagged("unique-held")

    @cached_property
    def unique_until(self) -> str:
        """Sorted set unique key -> until when that task holds it at the most."""
        return self._tagged("unique-until")

    @cached_property
    def moved(self) -> str:
        """Sorted set id -> when it came to another place in the backlog, for an hour."""
        return self._tagged("moved")

    @cached_property
    def wake(self) -> str:
        """Sorted set of wake tokens -> when to claim; on a Cluster also of who waits for one."""
        return self._tagged("wake")

    @cached_property
    def armed(self) -> str:
        """String "due_ms consumer": who has promised to claim at the next due time."""
        return self._tagged("armed")

    @cached_property
    def expires(self) -> str:
        """String: after how many ms without use the queue expires, where it does."""
        return self._tagged("expires")

    @cached_property
    def paused(self) -> str:
        """String "from until JSON": who has paused the queue, and why."""
        return self._tagged("paused")

    @cached_property
    def consumers(self) -> str:
        """Sorted set consumer -> end of its lease."""
        return self._tagged("consumers")

    @cached_property
    def granted_by(self) -> str:
        """String: run id of the server by whose clock the leases in `consumers` end."""
        return self._tagged("granted-by")

    def unacked(self, consumer: str) -> str:
        """Hash tag -> priority step + message, of one consumer."""
        return f"{self._start}unacked:{consumer}"

    @cached_property
    def expectations(self) -> str:
        """Hash name -> JSON: what is expected under it, or how that has ended."""
        return self._tagged("expectations")

    @cached_property
    def expectations_until(self) -> str:
        """Sorted set name -> when that is forgotten."""
        return self._tagged("expectations-until")

    @cached_property
    def answers(self) -> str:
        """Hash name -> JSON: an answer whose question has yet to come."""
        return self._tagged("answers")

    @cached_property
    def answers_until(self) -> str:
        """Sorted set name -> when that is forgotten."""
        return self._tagged("answers-until")

    def reclaimed(self, consumer: str) -> str:
        """Exists for a day where messages of this consumer were given to others."""
        return f"{self._start}reclaimed:{consumer}"

    def held(self, consumer: str) -> str:
        """Sorted set of the tags in a large unacked hash, while they are given back."""
        return self._tagged(f"held:{consumer}")

    @cached_property
    def dead(self) -> str:
        """Sorted set id -> time of burial."""
        return self._tagged("dead")

    @cached_property
    def dead_messages(self) -> str:
        """Hash id -> priority step + message, of the dead letters. Packed in buckets."""
        return self._tagged("dead-messages")

    @cached_property
    def dead_reasons(self) -> str:
        """Hash id -> JSON: why it was buried, and by whom. In buckets."""
        return self._tagged("dead-reasons")

    @cached_property
    def events(self) -> str:
        """Stream of lifecycle events."""
        return self._tagged("events")

    @cached_property
    def outcomes(self) -> str:
        """What the keys of outcomes begin with: hashes id -> text, and sorted sets of ids."""
        return self._tagged("outcomes:")

    @cached_property
    def latest(self) -> str:
        """Sorted set key -> the latest due time that was seen of it, for policies."""
        return self._tagged("latest")

    def job(self, job_id: str) -> str:
        """Hash id -> what a job has done with it; counts of each run, and the number of shards."""
        return self._tagged(f"job:{job_id}")

    def job_slice(self, job_id: str, number: str) -> str:
        """Hash id -> the same, of a job of over 512 ids: one of 4,096, by the SHA-1 of the id."""
        return self._tagged(f"job-slice:{number}:{job_id}")

    @cached_property
    def ledgers_until(self) -> str:
        """Sorted set key of what a job has done -> when that may be forgotten."""
        return self._tagged("ledgers-until")


def job_report(job_id: str, prefix: str = "") -> str:
    """String: what the last run of a job has done, as JSON."""
    return f"{prefix}kombu-delayed-job:{job_id}"


def job_state(ledger: str, prefix: str = "") -> str:
    """Hash: what a job is, and how far it has come."""
    return f"{prefix}kombu-delayed-job:{ledger}:state"


def jobs(prefix: str = "") -> str:
    """Sorted set name of a job's ledgers -> when it began, in ms, of the last 1,000 jobs."""
    return f"{prefix}kombu-delayed-jobs"


def job_shards(ledger: str, prefix: str = "") -> str:
    """Hash queue -> over how many shards a job spreads it, of jobs of version 0.1."""
    return f"{prefix}kombu-delayed-job:{ledger}:shards"


def job_pace(ledger: str, prefix: str = "") -> str:
    """String: until when the writers of a job with a rate have to wait, in ms."""
    return f"{prefix}kombu-delayed-job:{ledger}:pace"


def format_version(prefix: str = "") -> str:
    """String: the version of the format of all these keys, as "major.minor"."""
    return f"{prefix}kombu-delayed:format"


def shard_counts(prefix: str = "") -> str:
    """Hash queue -> the most shards that it was spread over; queues of one are not in it."""
    return f"{prefix}kombu-delayed-shards"


def bindings(exchange: str, prefix: str = "") -> str:
    """Set of an exchange's bindings, on a Cluster: in the slot of a queue of the same name."""
    return f"{prefix}_kombu.binding.{{{exchange}}}"


def lasting_bindings(exchange: str, prefix: str = "") -> str:
    """Set of those among an exchange's bindings that do not expire, on a Cluster."""
    return f"{prefix}_kombu.binding_permanent.{{{exchange}}}"


def shard_count(queue: str, prefix: str = "") -> str:
    """Hash: the same of this one queue, on a Cluster."""
    return f"{prefix}{{{queue}}}:shards"


def revoked_tasks(prefix: str = "") -> str:
    """Sorted set id of a revoked task -> when that was, in µs, of the last 50,000."""
    return f"{prefix}kombu-delayed-revoked"


def http_tokens(prefix: str = "") -> str:
    """Hash id of a token of the HTTP API -> JSON: the hash of its secret, and what it may."""
    return f"{prefix}kombu-delayed-http:tokens"


def http_session(id: str, prefix: str = "") -> str:
    """String of a login to the pages, by the hash of its secret: id of the token, expiring."""
    return f"{prefix}kombu-delayed-http:session:{id}"


def http_form(id: str, prefix: str = "") -> str:
    """String of a form of the pages that was sent, so that it is taken once; expiring."""
    return f"{prefix}kombu-delayed-http:form:{id}"


def http_host(host: str, prefix: str = "") -> str:
    """Sorted set id of an HTTP job that is posting to a host -> when its place is free again."""
    return f"{prefix}kombu-delayed-http:host:{{{host}}}"


def http_host_worker(host: str, worker: str, prefix: str = "") -> str:
    """Sorted set, as the host's: those of its places that one worker has taken."""
    return f"{http_host(host, prefix)}:worker:{worker}"


def http_host_timeouts(host: str, prefix: str = "") -> str:
    """String: the number of callbacks to a host in a row that timed out; expiring."""
    return f"{http_host(host, prefix)}:timeouts"


def http_topics(namespace: str, prefix: str = "") -> str:
    """Set of the topics that servers of version 0.1 have sent tasks of a namespace to over HTTP."""
    return f"{prefix}kombu-delayed-http:topics:{namespace}"


def http_task(namespace: str, id: str, prefix: str = "") -> str:
    """String: the topic of a task that was sent to a namespace over HTTP; expiring."""
    return f"{prefix}kombu-delayed-http:task:{namespace}\x1f{id}"


def literal(text: str) -> str:
    """Text as a pattern of SCAN that matches nothing else."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
