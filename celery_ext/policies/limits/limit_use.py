"""Changes how much a single message uses of the limits of its queue."""

from __future__ import annotations

from ..policy import Policy, PolicyError
from .limit import whole


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
