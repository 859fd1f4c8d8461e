"""How many tasks may run at once, and how fast they may start, across all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from kombu_delayed.message.durations import Rate, exact_text, parse_rate
from kombu_delayed.message.ticket import LimitNumbers, Ticket, Use
from kombu_delayed.store.global_limits import GLOBAL

from ..message import Message
from ..policy import Policy, PolicyError, length_ms
from .fair import Fair
from .gated import Declared, Gated, is_tenant, owned, share_name, with_uses
from .keys import By, by_text, checked_by, key_of, value_of

MOST = 1_000_000_000


class Limit(Gated):
    """Limits concurrency and rate: `Limit(concurrency=5, rate="100/m", by="customer")`.

    `concurrency` is how many tasks may run at once, `rate` how many may start in a period, with up
    to `burst` at once after a pause. `by` gives each key its own limit: the name of a header or of
    a keyword argument, or a function of the message. `weight`, a number or like `by`, is how many
    slots a task takes. Tasks selected by `critical`, which is like `by`, take none. Two limits of a
    queue with the same `by` need a `name`. With `scope="global"` all queues and tasks that have a
    limit of this name share its slots. Raises PolicyError for invalid values.
    """

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        rate: str | None = None,
        burst: int = 1,
        by: By | None = None,
        weight: int | By = 1,
        critical: By | None = None,
        name: str | None = None,
        scope: str = "queue",
    ) -> None:
        if concurrency is None and rate is None:
            raise PolicyError("Limit takes concurrency=…, rate=… or both")
        if scope not in ("queue", "global"):
            raise PolicyError(f"Limit(scope={scope!r}) takes 'queue' or 'global'")
        if not isinstance(name, (str, type(None))):
            raise PolicyError(f"Limit(name={name!r}) takes text")
        self.is_global = scope == "global"
        if self.is_global and (rate is not None or not name):
            raise PolicyError("Limit(scope='global') takes a name and concurrency, and no rate")
        self.concurrency = 0 if concurrency is None else whole("concurrency", concurrency)
        parsed = None if rate is None else _rate("Limit", rate)
        self.every_ms = parsed.every_ms if parsed else 0.0
        self.rate = str(parsed or "")
        self.burst = whole("burst", burst)
        if rate is None and burst != 1:
            raise PolicyError(f"Limit(burst={burst}) has an effect only with rate=…")
        self.by = by if by is None else checked_by("Limit(by=…)", by)
        self.weight = whole("weight", weight, 0) if isinstance(weight, int) else weight
        if not isinstance(self.weight, int):
            checked_by("Limit(weight=…)", self.weight)
        self.critical = None if critical is None else checked_by("Limit(critical=…)", critical)
        self.name = name or by_text(by) or "queue"
        self._given = f"concurrency={concurrency!r}, rate={rate!r}, burst={burst!r}"

    def __repr__(self) -> str:
        weight = self.weight if isinstance(self.weight, int) else by_text(self.weight)
        own = f"by={by_text(self.by)!r}, weight={weight!r}, critical={by_text(self.critical)!r}"
        if self.is_global:
            own += ", scope='global'"
        return f"Limit({self._given}, {own}, name={self.name!r})"

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError for another one of the same name."""
        names = [each.name for each in others if isinstance(each, Limit)]
        if names.count(self.name) > 1:
            raise PolicyError(f"{self}: another Limit is called {self.name!r} too: give it a name")

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        """Whether its queue must have one shard."""
        return not self.is_global

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        name, is_global = self._known_as(owner), self.is_global
        yield LimitNumbers(name, self.concurrency, self.every_ms, self.burst, is_global=is_global)

    def _known_as(self, owner: str) -> str:
        return f"{GLOBAL}{self.name}" if self.is_global else owned(owner, self.name)

    def declared(self, owner: str) -> Iterable[Declared]:
        yield Declared(
            self._known_as(owner),
            "limit",
            "" if self.is_global else owner,
            by_text(self.by),
            self.concurrency or None,
            self.rate,
            self.every_ms,
            self.burst,
            has_critical=self.critical is not None,
            is_of_tenants=is_tenant(self.by),
            is_global=self.is_global,
        )

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        name = self._known_as(owner)
        if self.is_global and any(use.limit == name for use in ticket.uses):
            return ticket  # both its queue and its task have it
        cost = self._cost(message, name)
        if cost == 0:  # it uses no capacity, so it does not wait
            return ticket
        given = self._given_by(message, name, "key")
        key = key_of(self.by, message) if given is None else given
        return with_uses(ticket, Use(name, key, cost))

    def _given_by(self, message: Message, known_as: str, what: str) -> Any:
        """Return the message's own value for this limit, or else for all; None if it has none."""
        found = {use.limit: getattr(use, what) for use in message.limit_uses}
        named = (found.get(name) for name in (self.name, known_as, None))
        return next((each for each in named if each is not None), None)

    def _cost(self, message: Message, known_as: str) -> int:
        given: int | None = self._given_by(message, known_as, "weight")
        if given is not None:
            return given
        if self.critical is not None and value_of(self.critical, message):
            return 0
        if isinstance(self.weight, int):
            return self.weight
        value = value_of(self.weight, message)
        weight = 1 if value is None else int(value) if isinstance(value, str) else value
        if weight < 0:
            raise ValueError(f"the weight of a task is at least 0, not {value!r}")
        # A fraction is rounded up, as a task of weight 0 does not wait.
        return min(ceil(weight), MOST)


class LimitUse(Policy):
    """Changes how much of a limit one message takes: `LimitUse("host", weight=3)`.

    `limit` is the name of a `Limit` of its queue or its task, as it was declared or as
    `app.delayed.limits` shows it; None: all of them. `key` and `weight` replace the values that the
    `Limit` reads from the message: whose capacity it uses, and how much. A `critical` message uses
    no capacity and does not wait. Raises PolicyError for invalid values.
    """

    is_of_message = True

    def __init__(
        self,
        limit: str | None = None,
        *,
        key: str | None = None,
        weight: int | None = None,
        critical: bool = False,
    ) -> None:
        if (key is None and weight is None) != bool(critical):
            raise PolicyError("LimitUse takes critical=True, or else key=…, weight=… or both")
        for name, text in (("limit", limit), ("key", key)):
            if text is not None and not isinstance(text, str):
                raise PolicyError(f"LimitUse({name}={text!r}) takes text")
        self.limit, self.key = limit, key
        self.weight = 0 if critical else weight if weight is None else whole("weight", weight, 0)

    def __repr__(self) -> str:
        return f"LimitUse({self.limit!r}, key={self.key!r}, weight={self.weight!r})"

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError for another one of the same limit."""
        limits = [each.limit for each in others if isinstance(each, LimitUse)]
        if limits.count(self.limit) > 1:
            raise PolicyError(f"{self}: a message has one LimitUse of a limit")


class Drain(Gated):
    """Limits the rate at which late tasks start: `Drain("50/s", after="5m")`.

    Tasks that are late by `after` or less are not limited. A task without a countdown or an ETA is
    late from when it was sent.
    """

    needs_first_due = True

    def __init__(self, rate: str, *, after: Any = "1m", burst: int = 1) -> None:
        parsed = _rate("Drain", rate)
        self.rate, self.every_ms = str(parsed), parsed.every_ms
        self.burst = whole("burst", burst)
        self.after_ms = length_ms("Drain(after=…)", after)
        self._given = rate

    def __repr__(self) -> str:
        return f"Drain({self._given!r}, after={exact_text(self.after_ms)!r}, burst={self.burst})"

    def check(self, others: tuple[Policy, ...]) -> None:
        if any(isinstance(each, Drain) and each is not self for each in others):
            raise PolicyError(f"{self}: one Drain is enough")

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        yield LimitNumbers(owned(owner, "late"), 0, self.every_ms, self.burst, self.after_ms)

    def declared(self, owner: str) -> Iterable[Declared]:
        yield Declared(
            owned(owner, "late"),
            "drain",
            owner,
            rate=self.rate,
            every_ms=self.every_ms,
            burst=self.burst,
            after_ms=self.after_ms,
        )

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        return with_uses(ticket, Use(owned(owner, "late")))


class Shares(Gated):
    """Divides slots among keys: `Shares(100, {"east": 0.4, "west": 0.6}, by="region")`.

    With `borrow`, a key may use more than its share while others do not need theirs: free slots go
    to the keys in turn, in proportion to their shares. Without it, each key has its own slots and
    no more. Keys that are not named share the rest, at least one slot.
    """

    def __init__(
        self, total: int, shares: Mapping[str, float], *, by: By = "tenant", borrow: bool = True
    ) -> None:
        self.total = whole("total", total)
        if not _are_fractions(shares):
            raise PolicyError(
                f"Shares takes a dict of fractions whose sum is at most 1, not {shares!r}"
            )
        if not isinstance(borrow, bool):
            raise PolicyError(f"Shares(borrow={borrow!r}) takes True or False")
        self.shares = {str(key): float(shares[key]) for key in sorted(shares, key=str)}
        self.by = checked_by("Shares(by=…)", by)
        self.borrow = self.is_of_queue = borrow
        self.turns_by = self.by if borrow else None

    def __repr__(self) -> str:
        own = f"by={by_text(self.by)!r}, borrow={self.borrow!r}"
        return f"Shares({self.total}, {self.shares!r}, {own})"

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError for a second one, and for Fair beside one that borrows."""
        if any(isinstance(each, Shares) and each is not self for each in others):
            raise PolicyError(f"{self}: a queue has one Shares")
        if self.borrow and any(isinstance(each, Fair) for each in others):
            raise PolicyError(f"{self} gives turns by its shares: it excludes Fair")

    def limits(self, owner: str) -> Iterable[LimitNumbers]:
        """The slots of each key, and of all."""
        yield LimitNumbers(owned(owner, "shares"), self.total)
        if not self.borrow:
            for key in ("", *self.shares):
                yield LimitNumbers(owned(owner, share_name(key)), self._slots(key))

    def declared(self, owner: str) -> Iterable[Declared]:
        yield Declared(
            owned(owner, "shares"),
            "shares",
            owner,
            by_text(self.by),
            self.total,
            shares={key: self._slots(key) for key in (*self.shares, "")},
            is_of_tenants=is_tenant(self.by),
        )

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        key = key_of(self.by, message)
        key = key if key in self.shares else ""
        ticket = with_uses(ticket, Use(owned(owner, "shares")))
        if not self.borrow:
            return with_uses(ticket, Use(owned(owner, share_name(key))))
        return replace(ticket, key=key, weight=max(self._slots(key) / self.total, 0.001))

    def _slots(self, key: str) -> int:
        share = self.shares.get(key, 1 - sum(self.shares.values()))
        return max(int(self.total * share + 1e-6), 1)


def _are_fractions(shares: Any) -> bool:
    if not isinstance(shares, Mapping) or not shares:
        return False
    given = shares.values()
    return all(isinstance(each, (int, float)) and each > 0 for each in given) and (
        sum(given) <= 1.000001
    )


def _rate(what: str, given: Any) -> Rate:
    try:
        return parse_rate(given)
    except ValueError as error:
        raise PolicyError(f"{what}: {error}") from error


def whole(name: str, number: Any, least: int = 1) -> int:
    """Return a number if a limit accepts it. Raises PolicyError that names it."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= MOST:
        raise PolicyError(f"{name} takes a whole number from {least} to {MOST}, not {number!r}")
    return number
