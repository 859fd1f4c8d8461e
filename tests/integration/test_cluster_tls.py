"""A node that accepts only TLS."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from kombu import Connection
from redis import RedisError

from tests.kit.clusters import free_cluster_port
from tests.kit.inbox import Inbox
from tests.kit.mail import MAIL, NEWS, publish
from tests.kit.servers import Server
from tests.kit.tls import start_tls_server
from tests.kit.wait import wait_until


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Cluster of one."""
    config = {"cluster-enabled": "yes", "tls-cluster": "yes", "tls-replication": "yes"}
    directory = tmp_path_factory.mktemp("guarded")
    with start_tls_server(directory, port=free_cluster_port(), config=config) as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTS", *range(16384))
            wait_until(lambda: _takes_writes(server), "the Cluster is up")
            client.delete("x")
        yield server


def _takes_writes(server: Server) -> bool:
    try:
        with server.client() as client:
            return bool(client.set("x", 1))
    except RedisError:
        return False


@pytest.mark.parametrize("beside", [False, True])
def test_messages_pass(node: Server, beside: bool) -> None:
    """TLS may be configured in the URL or beside it."""
    ca_file = str(node.ca_file)
    query = "" if beside else f"?ssl_ca_certs={quote(ca_file, safe='')}"
    scheme = "rediscluster" if beside else "redisclusters"
    url = f"delayed+{scheme}://127.0.0.1:{node.port}{query}"
    with Connection(url, ssl={"ssl_ca_certs": ca_file} if beside else False) as connection:
        inbox = Inbox(connection, MAIL, NEWS)
        inbox.drain(0.05)
        for queue, delay_ms in ((MAIL, 100), (MAIL, 0), (NEWS, 0)):
            publish(connection, f"{queue.name} {delay_ms}", queue=queue, delay_ms=delay_ms)
        assert sorted(inbox.receive(3)) == ["mail 0", "mail 100", "reader 0"]
