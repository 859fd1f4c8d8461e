"""Disturbances of a consumer's connections, or of its server."""

from __future__ import annotations

from tests.kit.servers import Server


def lose_scripts(server: Server) -> None:
    with server.client() as client:
        client.script_flush()


def close_connections(server: Server) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def cut_power(server: Server) -> None:
    """Kill the server and start it again."""
    server.kill()
    server.start()
