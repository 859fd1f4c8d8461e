"""What a worker costs that has nothing to do, beside one of the stock transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_connections(server: Server, tmp_path: Path, pool: str) -> None:
    """Counted when it has run a task and has answered: then each part has opened its own."""
    counts = {}
    for scheme in ("", "delayed+"):
        ledger = Ledger(tmp_path / f"{scheme}ledger")
        settings = Settings(f"{scheme}{server.url}", None, {}, str(ledger.path))
        with Worker(settings, tmp_path, pool=pool, concurrency=2) as worker:
            app = make_app(settings)
            ledger.wait_for_all([app.send_task("record").id])
            assert app.control.ping(destination=["w1@test"], timeout=30)
            counts[scheme] = connections(worker.pid, server.port)
            app.close()
    assert 0 < counts["delayed+"] <= counts[""]


def connections(pid: int, port: int) -> int:
    """Connections of a process to a port of this machine."""
    opened = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in opened for row in rows)
