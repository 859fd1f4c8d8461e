"""All that strikes a single server and its workers."""

from __future__ import annotations

from tests.crash.clock_faults import ClockFaults
from tests.crash.pool_faults import PoolFaults
from tests.crash.worker_faults import WorkerFaults


class SingleFaults(WorkerFaults, PoolFaults, ClockFaults):
    """Faults of workers, pools, the network, the clock and the server."""
