"""Checks a list of broker URLs, of which Kombu tries the next one after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

from ..connection.urls import CLUSTERS, LISTS
from ..errors import UrlError


def check_alternates(alternates: Sequence[Any]) -> None:
    """Raise UrlError for a failover list that Kombu could not follow."""
    urls = [url for url in alternates if isinstance(url, str) and "://" in url]
    for url in urls:
        scheme, _, rest = url.partition("://")
        if not scheme.startswith("delayed+"):
            raise UrlError(
                f"a failover URL begins with {scheme}://, so Kombu would leave this transport; "
                f"write delayed+{scheme}://{rest.rpartition('@')[2]}"
            )
        options = [name for name, _ in parse_qsl(rest.partition("?")[2])]
        refused = [n for n in options if not n.startswith("ssl_") and n != "credential_provider"]
        if refused and len(urls) > 1:
            raise UrlError(
                f"Kombu cannot switch to a failover URL with the option {refused[0]!r} after '?'; "
                "leave it out, or use a single URL"
            )
    _check_list(alternates, {url.partition("://")[0][8:] for url in urls})


def _check_list(alternates: Sequence[Any], schemes: set[str]) -> None:
    if schemes.isdisjoint(LISTS):
        return
    if len(schemes) > 1:
        kind = "Sentinels" if schemes.isdisjoint(CLUSTERS) else "a Cluster's nodes"
        raise UrlError(
            f"the broker URLs begin with {' and '.join(f'delayed+{s}://' for s in sorted(schemes))}"
            f"; a list is either of {kind}, all with the same beginning, or of servers"
        )
    if not schemes.isdisjoint(CLUSTERS):
        return
    for each in alternates:
        if "://" not in str(each):
            host = str(each).rpartition("@")[2]
            raise UrlError(
                f"each Sentinel has a URL of its own: write delayed+{schemes.pop()}://{host}"
            )
