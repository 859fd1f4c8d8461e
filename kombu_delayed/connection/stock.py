"""Finds workers of Kombu's own Redis transport, as far as the server can tell."""

from __future__ import annotations

from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError


def stock_consumers(client: Redis) -> list[str] | None:
    """Return the clients that wait with `BRPOP` in the database of this one.

    The stock transport's consumers do so, but other programs may, too. None if the user may not
    list clients; empty if the server does not know the command.
    """
    database = str(client.connection_pool.connection_kwargs.get("db") or 0)
    try:
        clients = client.client_list(_type="normal")
    except NoPermissionError:
        return None
    except ResponseError:
        return []
    return [
        f"{each.get('name') or 'client'} {each['addr']}"
        for each in clients
        if each.get("cmd") == "brpop" and each.get("db") == database
    ]
