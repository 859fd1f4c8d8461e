"""Signs callbacks, so that receivers can check their origin and age."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from contextlib import suppress

TIMESTAMP, SIGNATURE = "Delayed-Timestamp", "Delayed-Signature"


#: The prefix of secrets in base64, as in Standard Webhooks.
WHSEC = "whsec_"


class SignatureError(ValueError):
    """The signature of a callback is missing, wrong or too old."""


def sign(secrets: Iterable[str], body: bytes, now: float | None = None) -> dict[str, str]:
    """Headers for a body, with one signature for each secret."""
    keys = tuple(secrets)
    if not keys:
        return {}
    at = str(int(time.time() if now is None else now))
    return {TIMESTAMP: at, SIGNATURE: ", ".join(_signature(key, at, body) for key in keys)}


def sign_webhook(
    secrets: Iterable[str], id: str, body: bytes, now: float | None = None
) -> dict[str, str]:
    """Headers as in Standard Webhooks. A secret that begins with `whsec_` is in base64."""
    at = str(int(time.time() if now is None else now))
    content = f"{id}.{at}.".encode() + body
    signatures = [_webhook_signature(secret, content) for secret in secrets]
    signed = {"webhook-signature": " ".join(signatures)} if signatures else {}
    return {"webhook-id": id, "webhook-timestamp": at, **signed}


def _webhook_signature(secret: str, content: bytes) -> str:
    key = secret.encode()
    if secret.startswith(WHSEC):
        with suppress(ValueError):  # a text that only looks like such a secret
            key = b64decode(secret.removeprefix(WHSEC), validate=True)
    return "v1," + b64encode(hmac.digest(key, content, "sha256")).decode()


def verify(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_seconds: float = 300,
    now: float | None = None,
) -> None:
    """Check the signatures of a body. Raises SignatureError if none is valid."""
    given = {name.lower(): value for name, value in headers.items()}
    at, signatures = given.get(TIMESTAMP.lower(), ""), given.get(SIGNATURE.lower(), "")
    expected = _signature(secret, at, body)
    found = [each.strip().encode() for each in signatures.split(",")]
    is_ours = [hmac.compare_digest(expected.encode(), each) for each in found]
    if True not in is_ours:
        raise SignatureError("no signature matches this secret and body")
    age = (time.time() if now is None else now) - int(at)
    if abs(age) > tolerance_seconds:
        raise SignatureError(f"it was signed {age:.0f} seconds ago")


def _signature(secret: str, at: str, body: bytes) -> str:
    text = f"{at}.".encode() + body
    return "v1=" + hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
