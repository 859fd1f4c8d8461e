"""Locks that are free again in a child.

Python before 3.12 locks a class's `cached_property` while any thread evaluates it, such as one that
connects. If a process is forked then, as for a pool that grows, the child waits for ever.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from threading import RLock

#: Whose classes are evaluated in threads.
PACKAGES = frozenset({"celery", "celery_ext", "kombu", "kombu_delayed", "redis"})


def free_cached_properties() -> None:
    """Give each cached property of these packages a lock of its own."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            for each in tuple(vars(module).values()):
                if isinstance(each, type):
                    _free(each)


def _free(owner: type) -> None:
    for each in vars(owner).values():
        if isinstance(each, cached_property) and hasattr(each, "lock"):
            each.lock = RLock()


_is_watching = False


def watch() -> None:
    """Do so in each child of this process; twice is safe."""
    global _is_watching
    has_locks = sys.version_info < (3, 12)
    if has_locks and not _is_watching and hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(after_in_child=free_cached_properties)
        _is_watching = True
