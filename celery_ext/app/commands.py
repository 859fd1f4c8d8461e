"""Helpers of the commands: several options as one decorator, and errors as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ..errors import BROKER_FAILS, QueryError

Command = TypeVar("Command", bound=Callable[..., Any])


def all_of(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine several options into one decorator, in the order of the help page."""

    def decorate(command: Any) -> Any:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turn expected errors into a line on stderr and an exit code."""
    try:
        yield
    except QueryError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:
        raise
    except BROKER_FAILS as error:
        raise click.ClickException(" ".join(str(error).split())) from error
