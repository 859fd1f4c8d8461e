"""The identity of a caller, and its rights."""

from __future__ import annotations

from dataclasses import dataclass

#: Each allows what its name says; `admin` allows everything.
SCOPES = ("read", "schedule", "admin")


@dataclass(frozen=True)
class Identity:
    """A token, or nobody in particular; empty tenants and queues mean all."""

    name: str
    scopes: frozenset[str]
    tenants: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()

    def has(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raises a Problem if it does not have the scope."""
        if not self.has(scope):
            raise _forbidden(f"this token does not have the scope {scope}")

    def require_whole(self) -> None:
        """Check access to what covers all tenants. Raises a Problem if it is restricted to some."""
        if self.tenants:
            raise _forbidden("this token is restricted to tenants, and this covers all tenants")

    def require_all_queues(self) -> None:
        """Check access to what covers all queues. Raises a Problem if it is restricted to some."""
        if self.queues:
            raise _forbidden("this token is restricted to queues, and this covers all queues")

    def sees_queue(self, queue: str) -> bool:
        """Returns whether it may see a queue."""
        return not self.queues or queue in self.queues

    def sees(self, queue: str, tenant: str | None) -> bool:
        """Returns whether it may see a task of a queue and a tenant."""
        return self.sees_queue(queue) and (not self.tenants or tenant in self.tenants)

    def tenant_for(self, given: str | None) -> str | None:
        """The tenant of a new task. Raises a Problem for a tenant that it may not use."""
        if given is None and len(self.tenants) == 1:
            return next(iter(self.tenants))
        self.check_tenant(given)
        return given

    def check_tenant(self, tenant: str | None) -> None:
        """Raises a Problem for a tenant that it may not see."""
        if self.tenants and tenant not in self.tenants:
            raise _forbidden("this token is restricted to other tenants", "tenant")

    def check_queue(self, queue: str) -> None:
        """Raises a Problem for a queue that it may not see."""
        if not self.sees_queue(queue):
            raise _forbidden("this token is restricted to other queues", "queue")


def _forbidden(detail: str, field: str = "") -> Exception:
    from ..problems import Problem  # creating tokens needs no web framework

    return Problem.of_field(field, detail, 403) if field else Problem(403, detail)


ANYBODY = Identity("anybody", frozenset(SCOPES))
