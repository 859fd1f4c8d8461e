"""Errors with which tasks end, as Celery takes them."""

from __future__ import annotations

from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from kombu.exceptions import OperationalError

from kombu_delayed.errors import NotReplicated, ServerFull


def lost(error: BaseException) -> Exception:
    if isinstance(error, WorkerLostError):
        return error
    return WorkerLostError(f"The task's process has ended: {error!r}")


def raised(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except Exception:
        return ExceptionInfo()


def is_out_of_reach(reason: Any) -> bool:
    # A retry that the master already has is stored once, even if it is sent again.
    out_of_reach = isinstance(reason, (OperationalError, NotReplicated))
    return out_of_reach and not isinstance(reason, ServerFull)
