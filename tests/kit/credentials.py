"""Users of a server, and a provider of credentials that change while connections last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.auth.token import SimpleToken
from redis.credentials import StreamingCredentialProvider

from tests.kit.wait import wait_until

#: The file that `WatchedCredentials` reads.
VARIABLE = "KOMBU_DELAYED_TEST_CREDENTIALS"
LOOK_SECONDS = 0.05


def make_user(client: redis.Redis, name: str) -> None:
    client.acl_setuser(
        name,
        enabled=True,
        passwords=[f"+{password_of(name)}"],
        categories=["+@all"],
        keys=["*"],
        channels=["*"],
        reset=True,
    )


def password_of(name: str) -> str:
    return f"{name}'s secret"


def users(client: redis.Redis) -> set[str]:
    """The users with connections, apart from the tests' own."""
    return {each["user"] for each in client.client_list()} - {"default"}


def wait_for_users(client: redis.Redis, *names: str) -> None:
    wait_until(lambda: users(client) == set(names), f"all connections are of {names}")


class StreamedCredentials(StreamingCredentialProvider):
    """Tells its listeners when the user changes."""

    def __init__(self, user: str = "ada") -> None:
        self.user = user
        self._listeners: list[Callable[[Any], None]] = []

    def get_credentials(self) -> tuple[str, str]:
        return self.user, password_of(self.user)

    def on_next(self, callback: Callable[[Any], None]) -> None:
        self._listeners.append(callback)

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        pass

    def is_streaming(self) -> bool:
        return True

    def change(self, user: str) -> None:
        self.user = user
        token = SimpleToken(password_of(user), -1, 0, {"oid": user})
        for callback in tuple(self._listeners):
            callback(token)


class WatchedCredentials(StreamedCredentials):
    """The user whose name is in a file, for processes that get the provider by import path."""

    def __init__(self) -> None:
        self._path = Path(os.environ[VARIABLE])
        super().__init__(self._path.read_text())
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(LOOK_SECONDS):
            if (user := self._path.read_text()) not in ("", self.user):
                self.change(user)
