"""Two attempts at a task at the same time, on a real cluster: Spark starts none twice on a host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
import redis

from celery_ext.spark.java import ensure_java
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.jvm import SHORT_LIVED
from tests.kit.servers import Server, free_port
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SPARK = Path(pyspark.__file__).parent
START_SECONDS = 60
ROWS = 4_000


def with_package() -> dict[str, str]:
    """The environment, with this tree for Python."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": SHORT_LIVED}
    return {**os.environ, **own}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A master and two workers with a core each, on hosts of their own; the master's URL."""
    ensure_java()
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    environment = {**with_package(), "SPARK_DAEMON_MEMORY": "256m"}
    environment |= {"SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED}
    environment |= {"SPARK_WORKER_DIR": str(tmp_path / "work")}
    kinds = [("master.Master", "127.0.0.1", ["--port", str(port)])]
    for host in ("127.0.0.2", "127.0.0.3"):
        kinds.append(("worker.Worker", host, ["--cores", "1", "--memory", "1g", address]))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for kind, host, more in kinds:
            command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
            command += ["--host", host, "--webui-port", str(free_port()), *more]
            with (tmp_path / f"{kind}-{host}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
            if kind == "master.Master":
                wait_until(lambda: _listens(port), "the master listens", START_SECONDS)
        yield address
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_speculation(cluster: str, server: Server, client: redis.Redis, tmp_path: Path) -> None:
    """Both write the same rows, some of which have run by then; none is scheduled again."""
    output, store = tmp_path / "output", Store(client)
    client.config_resetstat()
    script = str(Path(__file__).with_name("speculation_job.py"))
    command = [sys.executable, script, cluster, f"delayed+{server.url}", str(server.port)]
    with output.open("wb") as log:
        job = subprocess.Popen(
            [*command, str(ROWS)],
            env=with_package(),
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        wait_until(lambda: bool(client.llen("test:half")), "the task is half way", START_SECONDS)
        wait_until(
            lambda: client.hlen("{celery}:messages") > ROWS / 2,
            "one task and a part of the other are stored",
            START_SECONDS,
        )
        ran = {id.decode() for id in client.hkeys("{celery}:messages")}
        assert sum(Backlog(store, "celery").cancel(ran)) == len(ran) < ROWS
        client.lpush("test:go", 1)
        told, _ = job.communicate(timeout=START_SECONDS)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, output.read_text()
    report = json.loads(told.splitlines()[-1])
    assert (report["accepted"], report["already"], report["refused"]) == (ROWS, 0, 0)
    assert set(check_backlog(client, "celery")) == {f"{n}" for n in range(ROWS)} - ran
    ledger = {id for id in client.hkeys("{celery}:job:j") if id[:1] != b"\x1f"}
    assert len(ledger) == ROWS
    assert client.info("commandstats")["cmdstat_eval"]["calls"] > ROWS / 50 + 20
