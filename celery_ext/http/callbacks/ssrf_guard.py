"""Keeps callbacks out of the inner network: what a URL may be, and where it may lead."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)

#: Of IPv4: private, loopback, link-local, shared, reserved, for documentation and for groups; and
#: an address of a cloud's own that looks public.
_DENIED_V4 = [
    ipaddress.IPv4Network(each)
    for each in [
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",
    ]
]

_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")

#: Of the global ones: tunnels that end at an IPv4 address, and those for documentation.
_DENIED_V6 = [
    ipaddress.IPv6Network(each)
    for each in [
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    ]
]

#: An IPv6 address whose interface is an IPv4 address (ISATAP).
_ISATAP = (0x00005EFE, 0x02005EFE)

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")
_NUMBER = re.compile(r"(0x[0-9a-f]*|\d+)\.?")

Resolve = Callable[..., Sequence[Any]]


class CallbackRefused(ValueError):
    """A callback may not go there."""


@dataclass(frozen=True)
class Target:
    """A URL in its parts; `host` is as DNS, a certificate and the header have it."""

    scheme: str
    host: str
    port: int
    path: str


def split(url: str) -> Target:
    """Read a URL. Raises CallbackRefused for what two programs could read in two ways."""
    if re.search(r"[\x00-\x20\x7f\\]", url) or not url.isprintable():
        raise CallbackRefused("it has spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError as error:
        raise CallbackRefused(f"it is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise CallbackRefused("give a URL that begins with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise CallbackRefused("a user name or password in a URL is not sent")
    if port == 0:
        raise CallbackRefused("there is no port 0")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii():
        raise CallbackRefused("its path has characters that must be encoded, such as %C3%BC")
    return Target(parts.scheme, _host(host), port or (443 if parts.scheme == "https" else 80), path)


def _host(given: str) -> str:
    try:
        if ":" in given and "%" not in given:
            return str(ipaddress.IPv6Address(given))
        host = given.encode("idna").decode().lower()
        if _NAME.fullmatch(host):
            # Other forms of a number, such as 0x7f.1, are read differently by different programs.
            is_number = _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])
            return str(ipaddress.IPv4Address(host)) if is_number else host
    except ValueError:
        pass
    raise CallbackRefused(f"{given[:100]!r} is not a host name or a plain address")


def is_allowed(target: Target, allow: Iterable[str]) -> bool:
    """Whether the operator has named the host."""
    names = (target.host.rstrip("."), f"{target.host.rstrip('.')}:{target.port}")
    return any(fnmatchcase(name, pattern.lower()) for pattern in allow for name in names)


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, and leads to no other by itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in _DENIED_V4)
    if found not in _GLOBAL_V6 or any(found in network for network in _DENIED_V6):
        return False
    return (int(found) >> 32) & 0xFFFFFFFF not in _ISATAP


def check_form(url: str, allow: Iterable[str] = ()) -> Target:
    """What can be said without asking DNS. Raises CallbackRefused."""
    target = split(url)
    if not is_allowed(target, allow) and _is_address(target.host) and not is_public(target.host):
        raise CallbackRefused(f"{target.host} is not a public address: {_how(target)}")
    return target


def _how(target: Target) -> str:
    return f"to allow it, add '{target.host}:{target.port}' to callback_allow"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(
    target: Target, allow: Iterable[str] = (), getaddrinfo: Resolve = socket.getaddrinfo
) -> list[tuple[Any, Any]]:
    """The addresses to connect to, each as (family, address), asked for once.

    Raises CallbackRefused where any of them is not public and the host is not allowed by name, and
    OSError where there is none.
    """
    try:
        found = getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise CallbackRefused(f"{target.host!r} is not a host name") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if not is_allowed(target, allow):
        for _, address in addresses:
            if not is_public(str(address[0])):
                # Who sent the job need not learn the addresses of the inner network.
                logger.warning("%s leads to %s, which is not public", target.host, address[0])
                leads = f"{target.host} leads to an address that is not public"
                raise CallbackRefused(f"{leads}: {_how(target)}")
    return addresses
