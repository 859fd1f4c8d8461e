"""Logins to the pages: a cookie that stands for a token, kept as a hash in Redis."""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256

from celery_ext.control.delayed import Delayed
from kombu_delayed.store.keys import http_form, http_session

from .tokens import Secrets, Token, Tokens, hash_of

#: The prefix of cookie names. Cookies ignore ports, and one of `/` is sent to all paths below it.
COOKIE = "delayed_session_"

#: How long a submitted form is remembered.
FORM_SECONDS = 3_600

_FORM = re.compile(r"[A-Za-z0-9_-]{43}")


def cookie_name(host: str, root: str) -> str:
    """The name for the pages at a host (with its port) and the path where they are mounted."""
    return COOKIE + sha256(f"{host.lower()}{root}".encode()).hexdigest()[:16]


def new_secret() -> str:
    """A secret that identifies a browser; it allows nothing before a login."""
    return secrets.token_urlsafe(32)


def is_secret(text: str) -> bool:
    """Returns whether a text has the form of a secret."""
    return _FORM.fullmatch(text) is not None


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
