"""The systems: their requirements, where they are installed, and how workers are started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tests.benchmarks.peers import rabbitmq

PROGRAMS = Path(__file__).with_name("programs")
#: Environments of peers that this one cannot have, kept between runs.
PLACE = Path(os.environ.get("BENCHMARK_PEERS", Path(__file__).parents[3] / ".venv" / "peers"))
#: BullMQ's jobs are asynchronous functions: one process runs many at a time.
NODE_SLOTS = 50
CELERY_WORKER = ("-m", "celery", "-A", "with_celery", "worker", "-c", "2", "--without-mingle")


@lru_cache
def newest_python() -> str:
    """An environment of Python 3.13 with the peers that need it, or "" if there is none."""
    python = PLACE / "python" / "bin" / "python"
    if not python.exists():
        kept = sorted(Path.home().glob(".pyenv/versions/3.13*/bin/python3.13"))
        base = shutil.which("python3.13") if not kept else str(kept[-1])
        if not base:
            return ""
        subprocess.run([base, "-m", "venv", python.parents[1]], check=True)
    packages = ["celery", "celery-redis-plus", "huey", "redis"]
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *packages], check=True, stdin=subprocess.DEVNULL)
    return str(python)


@lru_cache
def node_modules() -> str:
    """The folder with BullMQ, or "" without npm."""
    place = PLACE / "node"
    if not shutil.which("npm"):
        return ""
    if not (place / "node_modules" / "ioredis").exists():
        place.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "bullmq", "ioredis"]
        subprocess.run(command, cwd=place, check=True, stdin=subprocess.DEVNULL)
    return str(place / "node_modules")


@dataclass(frozen=True)
class System:
    """`server` is "valkey", "rabbitmq" or "" for none, and `scheme` replaces that of its URL."""

    name: str
    program: str = "with_celery.py"
    server: str = "valkey"
    scheme: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    worker: tuple[str, ...] = CELERY_WORKER
    executable: Callable[[], str] = lambda: sys.executable
    #: Why it cannot be measured here, or "" if it can.
    missing: Callable[[], str] = lambda: ""

    def url(self, server: str) -> str:
        rest = server.partition("://")[2]
        return f"{self.scheme}://{rest}" if self.scheme else server


def _needs_python() -> str:
    return "" if newest_python() else "it needs Python 3.13"


def _needs_node() -> str:
    return "" if shutil.which("node") and node_modules() else "it needs Node.js and npm"


QUORUM = {
    "task_default_queue_type": "quorum",
    "worker_detect_quorum_queues": True,
    "broker_transport_options": {"confirm_publish": True},
}

SYSTEMS = (
    System("kombu-delayed", scheme="delayed+redis", environment={"PEER_PACKAGE": "kombu-delayed"}),
    System("Celery, stock Redis"),
    System("Celery, in memory", server="", scheme="memory"),
    System(
        "celery-redis-plus",
        scheme="valkey",
        environment={"PEER_IMPORT": "celery_redis_plus", "PEER_PACKAGE": "celery-redis-plus"},
        executable=newest_python,
        missing=_needs_python,
    ),
    System("Celery, RabbitMQ, classic queue", server="rabbitmq", missing=rabbitmq.missing),
    System(
        "Celery, RabbitMQ, native delay",
        server="rabbitmq",
        environment={"PEER_SETTINGS": json.dumps(QUORUM)},
        missing=rabbitmq.missing,
    ),
    System(
        "Huey",
        program="with_huey.py",
        worker=("-m", "huey.bin.huey_consumer", "with_huey.huey", "-k", "process", "-w", "2"),
        executable=newest_python,
        missing=_needs_python,
    ),
    System(
        "BullMQ",
        program="with_bullmq.cjs",
        environment={"PEER_SLOTS": str(NODE_SLOTS)},
        worker=("with_bullmq.cjs", "worker"),
        executable=lambda: shutil.which("node") or "",
        missing=_needs_node,
    ),
)
