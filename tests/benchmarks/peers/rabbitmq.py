"""A RabbitMQ of its own, on loopback, with its data in a directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.rig import end
from tests.kit.servers import free_port
from tests.kit.wait import wait_until

#: Debian's wrappers on PATH insist on the service's user.
SCRIPTS = Path("/usr/lib/rabbitmq/bin")


def missing() -> str:
    there = shutil.which("epmd") and (SCRIPTS / "rabbitmq-server").exists()
    return "" if there else "`apt-get install rabbitmq-server`"


@contextlib.contextmanager
def start_rabbitmq(directory: Path) -> Iterator[str]:
    """Start a RabbitMQ and yield its URL."""
    port, names_port = free_port(), free_port()
    directory.mkdir(parents=True)
    environment = {
        **os.environ,
        "HOME": str(directory),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names_port),
        "RABBITMQ_NODENAME": "peers@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
    }
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "output").open("wb"))
        for command in (
            ["epmd", "-port", str(names_port), "-address", "127.0.0.1"],
            [str(SCRIPTS / "rabbitmq-server")],
        ):
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(end, process)
        control = [str(SCRIPTS / "rabbitmqctl"), "await_startup", "--timeout", "60"]
        wait_until(lambda: _asked(control, environment), "RabbitMQ has started", 90, 1)
        yield f"amqp://guest:guest@127.0.0.1:{port}//"


def _asked(command: list[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(
        command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0
