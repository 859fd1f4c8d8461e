"""The connection on which a consumer waits for wake tokens of the current master."""

from __future__ import annotations

from ..wakeup import WakeConnection
from .watch import MasterChanges, MasterWatch


class MasterWake(WakeConnection):
    """Waits for tokens of the current master, never of a former one."""

    watch: MasterWatch

    def check(self, now: float) -> bool:
        """Like any. Raises MasterChanges if it has left the master or a failover is under way."""
        if self.watch.is_held:
            raise MasterChanges("the Sentinels are about to name another master")
        if self.connection is not None and self.connection.has_left:
            raise MasterChanges("the Sentinels name another master")
        return super().check(now)
