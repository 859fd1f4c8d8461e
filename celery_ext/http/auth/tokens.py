"""Tokens of the API, and logins to the pages: a cookie stands for a token.

Tokens are created and revoked on the command line. Redis has hashes of them and of the cookies.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from kombu.utils.functional import LRUCache

from celery_ext.control.delayed import Delayed
from celery_ext.errors import QueryError
from kombu_delayed.connection.commands import pairs
from kombu_delayed.store.keys import http_form, http_session, http_tokens

from .identity import SCOPES, Identity

#: How long a process caches a token: a revoked one works no longer than this.
BELIEVED_SECONDS = 5.0

#: How many tokens a process caches, including wrong ones.
REMEMBERED = 10_000

#: The prefix of cookie names. Cookies ignore ports, and one of `/` is sent to all paths below it.
COOKIE = "delayed_session_"

#: How long a submitted form is remembered.
FORM_SECONDS = 3_600

#: The prefix of all tokens, so that others in the same header can be told apart.
PREFIX = "kd_"

_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_FORM = re.compile(rf"{PREFIX}([0-9a-f]{{16}})_({_SECRET.pattern})")


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
        if not all((name, *tenants, *queues)):
            raise QueryError("the name of a token, a tenant or a queue cannot be empty")
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
        return token, f"{PREFIX}{token.id}_{secret}"

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
    return sha256(text.encode()).hexdigest()


def _read(raw: bytes) -> tuple[Token, str]:
    found: dict[str, Any] = json.loads(raw)
    kept = found.pop("hash")
    for name in ("scopes", "tenants", "queues"):
        found[name] = tuple(found[name])
    return Token(**found), kept


def cookie_name(host: str, root: str) -> str:
    """The name for the pages at a host (with its port) and the path where they are mounted."""
    return COOKIE + sha256(f"{host.lower()}{root}".encode()).hexdigest()[:16]


def new_secret() -> str:
    """A secret that identifies a browser; it allows nothing before a login."""
    return secrets.token_urlsafe(32)


def is_secret(text: str) -> bool:
    """Returns whether a text has the form of a secret."""
    return _SECRET.fullmatch(text) is not None


def csrf_of(secret: str) -> str:
    """The CSRF token that forms must have: it cannot be made without the secret."""
    return hmac.new(secret.encode(), b"forms of the pages", sha256).hexdigest()


class Sessions(Secrets):
    """The logins in an app's broker."""

    def __init__(self, delayed: Delayed, seconds: int) -> None:
        super().__init__()
        self._delayed = delayed
        self._tokens = Tokens(delayed)
        self._seconds = seconds

    def begin(self, token_text: str) -> tuple[str, Token] | None:
        """Log in with a token: returns a new secret, or None if the token is not valid."""
        token = self._tokens.look(token_text)
        if token is None:
            return None
        secret = new_secret()
        self._delayed.store.run("SET", self._key(secret), token.id, "EX", self._seconds)
        return secret, token

    def end(self, secret: str) -> None:
        """Log out: invalidate a secret. Other processes accept it for a few more seconds."""
        self._delayed.store.run("DEL", self._key(secret))
        self._believe(secret, None)

    def take_form(self, id: str) -> bool:
        """Returns whether a form is submitted for the first time: twice would move tasks twice."""
        key = http_form(hash_of(id), self._delayed.store.keys("").prefix)
        return bool(self._delayed.store.run("SET", key, 1, "EX", FORM_SECONDS, "NX"))

    def _looked_up(self, text: str) -> Token | None:
        if not is_secret(text):
            return None
        id = self._delayed.store.run("GET", self._key(text))
        return self._tokens.of_id(id.decode()) if id else None

    def _key(self, secret: str) -> str:
        return http_session(hash_of(secret), self._delayed.store.keys("").prefix)
