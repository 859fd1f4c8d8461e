"""Which errors of a command are the user's to put right, and how they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..errors import BROKER_FAILS, QueryError


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turn what may well happen into a line on stderr and an exit code."""
    try:
        yield
    except QueryError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:
        raise
    except BROKER_FAILS as error:
        raise click.ClickException(" ".join(str(error).split())) from error
