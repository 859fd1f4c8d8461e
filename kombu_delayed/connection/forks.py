"""Frees locks in forked children.

Before 3.12 Python locks a class's `cached_property` while any thread evaluates it, such as one that
connects. If the process forks at that moment, for example to grow a pool, the child waits forever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any

#: The packages whose classes have cached properties that threads evaluate.
PACKAGES = frozenset({"celery", "celery_ext", "kombu", "kombu_delayed", "redis"})


def free_cached_properties() -> None:
    """Give each cached property of these packages a new lock."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            for each in tuple(vars(module).values()):
                if isinstance(each, type):
                    _free(each)


def _free(owner: type) -> None:
    for each in vars(owner).values():
        if isinstance(each, cached_property) and hasattr(each, "lock"):
            each.lock = RLock()


def in_children(function: Callable[[], object], lock: Any = None) -> None:
    """Call a function in each child that this process forks from now on.

    With a `lock`, the process does not fork while another thread has it.
    """
    if not hasattr(os, "register_at_fork"):  # Windows does not fork
        return
    if lock is not None:
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    os.register_at_fork(after_in_child=function)


def watch() -> None:
    """Free the locks of cached properties in each child."""
    if sys.version_info < (3, 12):
        in_children(free_cached_properties)
