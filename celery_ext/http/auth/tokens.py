"""Tokens of the API: created and revoked on the command line, stored as hashes in Redis."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kombu.utils.functional import LRUCache

from celery_ext.control.delayed import Delayed
from celery_ext.errors import QueryError
from kombu_delayed.connection.commands import pairs
from kombu_delayed.store.keys import http_tokens

from .identity import SCOPES, Identity

#: How long a process caches a token: a revoked one works no longer than this.
BELIEVED_SECONDS = 5.0

#: How many tokens a process caches, including wrong ones.
REMEMBERED = 10_000

_FORM = re.compile(r"kd_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True)
class Token:
    """A token without its secret; empty tenants and queues mean all. Times are s since the epoch.

    `expires` is 0 for a token that does not expire.
    """

    id: str
    name: str
    scopes: tuple[str, ...]
    tenants: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    created: int = 0
    expires: int = 0

    @property
    def identity(self) -> Identity:
        return Identity(
            f"{self.id} {self.name}",
            frozenset(self.scopes),
            frozenset(self.tenants),
            frozenset(self.queues),
        )

    @property
    def has_expired(self) -> bool:
        return bool(self.expires) and time.time() >= self.expires


class Secrets(ABC):
    """Texts that stand for tokens. A token that was looked up is cached for a while."""

    def __init__(self) -> None:
        self._known: Any = LRUCache(REMEMBERED)

    def known(self, text: str) -> tuple[bool, Token | None]:
        """Returns whether the token of a text is cached, and the token; None if it is invalid."""
        at, token = self._known.get(hash_of(text), (-BELIEVED_SECONDS, None))
        return time.monotonic() - at < BELIEVED_SECONDS, _valid(token)

    def look(self, text: str) -> Token | None:
        """Look up the token of a text; returns None if it is invalid."""
        token = self._looked_up(text)
        self._believe(text, token)
        return _valid(token)

    def _believe(self, text: str, token: Token | None) -> None:
        self._known[hash_of(text)] = (time.monotonic(), token)

    @abstractmethod
    def _looked_up(self, text: str) -> Token | None: ...


class Tokens(Secrets):
    """The tokens in an app's broker."""

    def __init__(self, delayed: Delayed) -> None:
        super().__init__()
        self._delayed = delayed

    @property
    def _key(self) -> str:
        return http_tokens(self._delayed.store.keys("").prefix)

    def create(
        self,
        name: str,
        scopes: Iterable[str],
        tenants: Iterable[str] = (),
        queues: Iterable[str] = (),
        seconds: int = 0,
    ) -> tuple[Token, str]:
        """Create a token; returns it and its text, which is stored nowhere. Raises QueryError."""
        wanted = tuple(dict.fromkeys(scopes))
        if not wanted or not set(wanted) <= set(SCOPES):
            raise QueryError(f"scopes are some of {', '.join(SCOPES)}, not {', '.join(wanted)!r}")
        if not all((*tenants, *queues)):
            raise QueryError("tenants and queues have names")
        now, secret = int(time.time()), secrets.token_urlsafe(32)
        token = Token(
            secrets.token_hex(8),
            name,
            wanted,
            tuple(tenants),
            tuple(queues),
            now,
            now + seconds if seconds else 0,
        )
        kept = json.dumps({**asdict(token), "hash": hash_of(secret)})
        self._delayed.store.run("HSET", self._key, token.id, kept)
        return token, f"kd_{token.id}_{secret}"

    def list(self) -> list[Token]:
        """All tokens, the oldest first."""
        found = pairs(self._delayed.store.run("HGETALL", self._key))
        return sorted((_read(raw)[0] for _, raw in found), key=lambda each: each.created)

    def revoke(self, id: str) -> bool:
        """Revoke a token; returns whether there was one with this id."""
        return bool(self._delayed.store.run("HDEL", self._key, id))

    def of_id(self, id: str) -> Token | None:
        """The valid token with an id, whose text was checked before."""
        raw = self._delayed.store.run("HGET", self._key, id)
        return _valid(_read(raw)[0]) if raw else None

    def _looked_up(self, text: str) -> Token | None:
        form = _FORM.fullmatch(text)
        if form is None:
            return None
        raw = self._delayed.store.run("HGET", self._key, form[1])
        # Compares even without a token, so that the time reveals nothing.
        token, kept = _read(raw) if raw else (None, hash_of(""))
        return token if hmac.compare_digest(kept, hash_of(form[2])) else None


def _valid(token: Token | None) -> Token | None:
    return None if token is None or token.has_expired else token


def hash_of(text: str) -> str:
    """The hash of a secret. Secrets are 256 random bits, so they need no slow hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def _read(raw: bytes) -> tuple[Token, str]:
    found: dict[str, Any] = json.loads(raw)
    kept = found.pop("hash")
    for name in ("scopes", "tenants", "queues"):
        found[name] = tuple(found[name])
    return Token(**found), kept
