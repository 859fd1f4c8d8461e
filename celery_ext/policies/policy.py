"""The base of all policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu_delayed.consumer.policy.decisions import Decision, Run
from kombu_delayed.errors import OptionError
from kombu_delayed.message.durations import parse_ms

from .message import Message

if TYPE_CHECKING:
    from typing_extensions import Self

RUN = Run()

#: Makes plain data of a policy: see `written`, which knows all of them.
to_json: Callable[[Any], Any] = repr


class Policy:
    """Decides whether messages of a queue, or of a task, may run.

    A subclass defines `decide`. The worker that received the message calls it before the task
    starts.
    """

    #: The arguments of its constructor.
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        policy = super().__new__(cls)
        object.__setattr__(policy, "_arguments", (args, kwargs))  # the class may be frozen
        return policy

    def __repr__(self) -> str:
        """The same in all processes, so that they recognize the tickets of each other."""
        return f"{type(self).__qualname__}()"

    def decide(self, message: Message) -> Decision:
        """Return Run, Delay, Drop or Bury for a message."""
        return RUN

    @property
    def _decides(self) -> bool:
        """Whether it must be asked, because it has its own `decide`."""
        decide = getattr(self.decide, "__func__", None)
        return decide is not Policy.decide or type(self)._asked is not Policy._asked

    def _asked(self, message: Message) -> Decision:
        # Under a name that a user's policy is unlikely to have.
        return self.decide(message)

    def planned_ms(self, at_ms: int) -> tuple[int, str]:
        """Return when a message due at this time may run, in ms, and why. Called on sending."""
        return at_ms, ""

    #: Whether no policy behind it is ever checked.
    is_last = False

    #: Whether only single messages have it.
    is_of_message = False

    #: Whether messages must record when they were first due, even those without a delay.
    needs_first_due = False

    def check(self, others: tuple[Policy, ...]) -> None:
        """Raises PolicyError if it cannot be combined with the others of its queue or task."""

    def __json__(self) -> Any:
        """Return it for options that are JSON: those of a canvas, and in `celery inspect`."""
        return to_json(self)


class PolicyError(OptionError):
    """A policy is invalid as declared."""


def length_ms(what: str, given: Any) -> int:
    """Return a length of time in milliseconds. Raises PolicyError that begins with `what`."""
    try:
        return parse_ms(given)
    except ValueError as error:
        raise PolicyError(f"{what}: {error}") from error


def checked(where: str, policies: Any, is_of_message: bool = False) -> tuple[Policy, ...]:
    """Return the policies of a queue, a task or a message. Raises PolicyError that names it."""
    if not isinstance(policies, (list, tuple)):
        raise PolicyError(f"{where}: policies are a list, not {policies!r}")
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PolicyError(f"{where}: {policy!r} is not a policy: use those of {__package__}")
        if policy.is_of_message and not is_of_message:
            raise PolicyError(f"{where}: {policy} is for single messages: apply_async(policies=…)")
    found = tuple(policies)
    for policy in found:
        try:
            policy.check(found)
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from error
    return found
