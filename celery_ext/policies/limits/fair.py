"""Turns between tenants, and order within one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kombu_delayed.message.ticket import PLACES, Ticket

from ..message import Message
from ..policy import Policy, PolicyError
from .gated import Gated
from .keys import By, by_text, checked_by, key_of, value_of

#: The range of the weight of a key.
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1_000_000


class Fair(Gated):
    """Gives keys with waiting tasks turns: `Fair(by="tenant", weights={"ada": 3})`.

    `by` is the name of a header or of a keyword argument, or is called with the message. A key of
    weight 3 has three turns where others have one; `weights` may be a function of the key.
    """

    is_of_queue = True
    is_whole = False  # a key with messages in all shards has the same number of turns in each

    def __init__(
        self,
        *,
        by: By = "tenant",
        weights: Mapping[str, float] | Callable[[str], float] | None = None,
    ) -> None:
        self.by = self.turns_by = checked_by("Fair(by=…)", by)
        self.weights = weights or {}
        if isinstance(self.weights, Mapping):
            given, self.weights = self.weights, {}
            for key in given:
                self._checked(key, given[key])
                self.weights[str(key)] = given[key]  # the keys of messages are text
        elif not callable(self.weights):
            raise PolicyError(f"Fair(weights=…) takes a dict or a function, not {weights!r}")

    def __repr__(self) -> str:
        given = self.weights
        weights = by_text(given) if callable(given) else {key: given[key] for key in sorted(given)}
        return f"Fair(by={by_text(self.by)!r}, weights={weights!r})"

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError for a second one: a queue has one order of turns."""
        if any(isinstance(each, Fair) and each is not self for each in others):
            raise PolicyError(f"{self}: a queue has one Fair, or Shares that borrow")

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        key = key_of(self.by, message)
        return replace(ticket, key=key, weight=self._weight(key))

    def _weight(self, key: str) -> float:
        if callable(self.weights):
            return self._checked(key, self.weights(key))
        return self.weights.get(key, 1.0)

    @staticmethod
    def _checked(key: str, weight: float) -> float:
        if not isinstance(weight, (int, float)) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise PolicyError(
                f"the weight of {key!r} must be a number from {LEAST_WEIGHT:g} to "
                f"{MOST_WEIGHT:g}, not {weight!r}"
            )
        return float(weight)


class Order(Gated):
    """Orders tasks within a key: `Order("priority", "due")` or `Order("due", "priority")`.

    `by` selects the priority: the name of a header or of a keyword argument, or a function of the
    message; None: Kombu's priority. A priority is any whole number. The lowest is the most urgent,
    as in Kombu, or with `urgent="high"` the highest.
    """

    is_of_queue = True

    def __init__(self, *parts: str, by: By | None = None, urgent: str = "low") -> None:
        if sorted(parts) != ["due", "priority"]:
            raise PolicyError(f'Order takes "priority" and "due" in their order, not {parts!r}')
        if urgent not in ("low", "high"):
            raise PolicyError(f"Order(urgent={urgent!r}) takes 'low' or 'high'")
        self.parts = parts
        self.by = by if by is None else checked_by("Order(by=…)", by)
        self._sign = 1 if urgent == "low" else -1
        self._urgent = urgent

    def __repr__(self) -> str:
        parts = ", ".join(map(repr, self.parts))
        return f"Order({parts}, by={by_text(self.by)!r}, urgent={self._urgent!r})"

    def check(self, others: tuple[Policy, ...]) -> None:
        if any(isinstance(each, Order) and each is not self for each in others):
            raise PolicyError(f"{self}: a queue has one Order")

    def stamp(self, ticket: Ticket, message: Message, owner: str) -> Ticket:
        value = message.info.priority if self.by is None else value_of(self.by, message)
        urgency = self._sign * int(value or 0)
        if self.parts[0] == "priority":
            return replace(ticket, rank=urgency)
        return replace(ticket, rank=0, place=urgency + PLACES // 2)
