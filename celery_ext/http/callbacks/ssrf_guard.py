"""Keeps callbacks out of the internal network: which URLs and addresses they may call."""

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

#: IPv4 addresses that are private, loopback, link-local, shared, reserved, multicast or for
#: documentation, and a cloud's internal address that looks public.
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

#: Global IPv6 addresses that are for tunnels to an IPv4 address, or for documentation.
_DENIED_V6 = [
    ipaddress.IPv6Network(each)
    for each in [
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    ]
]

#: Marks an IPv6 address whose interface is an IPv4 address (ISATAP).
_ISATAP = (0x00005EFE, 0x02005EFE)

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")
_NUMBER = re.compile(r"(0x[0-9a-f]*|\d+)\.?")

Resolve = Callable[..., Sequence[Any]]


class CallbackRefused(ValueError):
    """A callback is not allowed."""


@dataclass(frozen=True)
class Target:
    """The parts of a URL; `host` has the form for DNS, certificates and the Host header."""

    scheme: str
    host: str
    port: int
    path: str


def split(url: str) -> Target:
    """Parse a URL. Raises CallbackRefused for one that programs could read differently."""
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
            # Programs read other forms of a number, such as 0x7f.1, differently.
            is_number = _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])
            return str(ipaddress.IPv4Address(host)) if is_number else host
    except ValueError:
        pass
    raise CallbackRefused(f"{given[:100]!r} is not a host name or a plain address")


def is_allowed(target: Target, allow: Iterable[str]) -> bool:
    """Returns whether the operator has allowed the host by name."""
    names = (target.host.rstrip("."), f"{target.host.rstrip('.')}:{target.port}")
    return any(fnmatchcase(name, pattern.lower()) for pattern in allow for name in names)


def is_public(address: str) -> bool:
    """Returns whether an address is on the public internet and does not embed another address."""
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
    """Check a URL without DNS. Raises CallbackRefused."""
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
    """Ask DNS once for the addresses to connect to, each as (family, address).

    Raises CallbackRefused if one of them is not public and the host is not allowed by name, and
    OSError if there is none.
    """
    try:
        found = getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise CallbackRefused(f"{target.host!r} is not a host name") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if not is_allowed(target, allow):
        for _, address in addresses:
            if not is_public(str(address[0])):
                # Only logged: the job's creator must not learn addresses of the internal network.
                logger.warning("%s leads to %s, which is not public", target.host, address[0])
                leads = f"{target.host} leads to an address that is not public"
                raise CallbackRefused(f"{leads}: {_how(target)}")
    return addresses
