"""Broker URLs: the part after `delayed+`, and the connection parameters that follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from kombu import Connection
from kombu.utils.url import parse_ssl_cert_reqs, url_to_parts

from ..errors import UrlError
from .options import check_tls_options

FORMS = (
    "delayed+redis://[user:password@]host:port/db, delayed+rediss://…, "
    "delayed+socket:///path/to.sock?virtual_host=0, delayed+embedded:///directory, "
    "delayed+sentinel://[user:password@]host:26379/db;delayed+sentinel://host:26379 or "
    "delayed+rediscluster://[user:password@]host:6379;host:6379"
)
SENTINELS = ("sentinel", "sentinels")
CLUSTERS = ("rediscluster", "redisclusters")
#: Several URLs with these schemes lead to one broker: Kombu need not choose among them.
LISTS = (*SENTINELS, *CLUSTERS)
SCHEMES = ("redis", "rediss", "socket", "embedded", *LISTS)
_TLS = ("rediss", "sentinels", "redisclusters")
SENTINEL_PORT, NODE_PORT = 26379, 6379
_QUERY = ("virtual_host", "credential_provider")
#: Kombu accepts these in a URL, but its own Redis transport ignores them, too.
_WITHOUT_USE = ("connect_timeout", "heartbeat", "insist", "login_method")
_PATHS = ("socket", "embedded")
#: The path and the options of a URL, which may contain an @, too.
_PATH = re.compile(r"(?:^|(?<=@))\.?/")
_OPTIONS = re.compile(r"\?\w+=")


@dataclass(frozen=True)
class Address:
    """Where the server is. `path` is that of a socket, or an embedded server's directory.

    `sentinels` are (host, port) of the Sentinels that know where the server is, `nodes` those of
    some nodes of a Cluster. With either, host and port are unset.
    """

    scheme: str
    host: str | None = None
    port: int | None = None
    username: str | None = None
    password: Any = field(default=None, repr=False)
    path: str = ""
    virtual_host: str | int | None = None
    credential_provider: Any = None
    ssl: dict[str, Any] | None = field(default=None, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of a single server that is reached over TCP."""
        return self.host or "127.0.0.1", self.port or NODE_PORT

    @property
    def place(self) -> str:
        """Where one server listens, for people."""
        return self.path or "{}:{}".format(*self.server)

    @property
    def silence(self) -> str:
        """The error if that server hangs."""
        return f"{self.place} accepts connections and does not answer"


class Host(str):
    """A server's host, as other programs expect it in a connection, with the whole URL.

    `is_plain`: the URL was given without `delayed+`, and the transport separately.
    """

    url: str
    is_plain: bool

    def __new__(cls, host: str, url: str = "", is_plain: bool = False) -> Host:
        made = super().__new__(cls, host)
        made.url, made.is_plain = url, is_plain
        return made


def scheme_of(client: Connection) -> str:
    """Return the scheme between `delayed+` and `://`."""
    hostname = _hostname(client)
    if "://" in hostname:
        return hostname.partition("://")[0]
    # After a failover Kombu has split the URL itself and left its scheme in the transport's name.
    return str(client.transport_cls).partition("delayed+")[2] or "redis"


def address(client: Connection) -> Address:
    """Return the address of a Kombu connection. Raises UrlError, which names the right form."""
    hostname, scheme = _hostname(client), scheme_of(client)
    if scheme in LISTS:
        return _from_list(scheme, client)
    if "://" in hostname:
        return _from_url(hostname, client)
    is_path = scheme in _PATHS
    return Address(
        scheme,
        host=hostname,
        port=client.port,
        username=client.userid,
        password=client.password,
        path=_path(scheme, "." if hostname == "." else None, client.virtual_host)
        if is_path
        else "",
        virtual_host=None if is_path else client.virtual_host,
        credential_provider=_provider(client),
        ssl=_ssl(scheme, client.ssl, {}),
    )


def _is_plain(client: Connection) -> bool:
    """Whether the URL was given without `delayed+`, for programs that know `redis://` only."""
    if isinstance(client.hostname, Host):
        return client.hostname.is_plain
    scheme, separator, _ = (client.hostname or "").partition("://")
    return bool(separator) and scheme in SCHEMES and not client.uri_prefix


def _hostname(client: Connection) -> str:
    """Return the URL, or its host if Kombu has split it. Clones after a failover add prefixes."""
    if isinstance(client.hostname, Host):
        return client.hostname.url
    bare = re.sub(r"^(delayed\+)+", "", client.hostname or "localhost")
    return "localhost" if bare == "delayed://" else re.sub(r"^delayed://", "redis://", bare)


def _from_url(url: str, client: Connection) -> Address:
    try:
        parts = url_to_parts(url)
    except ValueError:
        # Python's message is left out: it quotes a part that may belong to the password.
        raise UrlError(
            f"cannot read the broker URL; are special characters of the password percent-encoded? "
            f"It is {FORMS}"
        ) from None
    if parts.scheme not in SCHEMES:
        raise UrlError(f"there is no delayed+{parts.scheme}:// broker URL; it is {FORMS}")
    query = dict(parts.query)
    ssl_options = {name: query.pop(name) for name in list(query) if name.startswith("ssl_")}
    unknown = sorted(set(query) - {*_QUERY, *_WITHOUT_USE})
    if unknown:
        raise UrlError(
            f"the broker URL takes no option {unknown[0]!r} after '?', only ssl_… and "
            f"{', '.join(_QUERY)}; other options go into broker_transport_options"
        )
    is_path = parts.scheme in _PATHS
    return Address(
        parts.scheme,
        host=parts.hostname,
        port=parts.port,
        username=parts.username or client.userid,
        password=parts.password or client.password,
        path=_path(parts.scheme, parts.hostname, parts.path) if is_path else "",
        virtual_host=query.get("virtual_host")
        or (client.virtual_host if is_path else parts.path or client.virtual_host),
        credential_provider=query.get("credential_provider") or _provider(client),
        ssl=_ssl(parts.scheme, client.ssl, ssl_options),
    )


def _from_list(scheme: str, client: Connection) -> Address:
    """Return one address for all URLs of the list: they lead to one broker, whichever is in use."""
    each = [_from_url(url, client) for url in _listed_urls(client)]
    given = client._initial_params
    are_nodes = scheme in CLUSTERS
    port = NODE_PORT if are_nodes else SENTINEL_PORT
    places = tuple(dict.fromkeys((one.host or "localhost", one.port or port) for one in each))
    found = Address(
        scheme,
        username=_agreed(each, "username", "user") or given["userid"],
        password=_agreed(each, "password", "password") or given["password"],
        virtual_host=_agreed(each, "virtual_host", "database") or given["virtual_host"] or "/",
        credential_provider=_agreed(each, "credential_provider", "credential provider"),
        ssl=next((one.ssl for one in each if one.ssl), each[0].ssl),
        sentinels=() if are_nodes else places,
        nodes=places if are_nodes else (),
    )
    if found.nodes and str(found.virtual_host).strip("/") not in ("", "0"):
        raise UrlError(f"a Cluster has no database {found.virtual_host}, only 0: leave it out")
    return found


def _listed_urls(client: Connection) -> list[str]:
    scheme = scheme_of(client)
    urls = [str(url) for url in client.alt]
    if any("://" in url for url in urls):
        return [
            url.partition("delayed+")[2] if "://" in url else f"{scheme}://{url}" for url in urls
        ]
    own = _hostname(client)
    port = f":{client.port}" if client.port else ""
    return [own if "://" in own else f"{scheme}://{own}{port}"]


def _agreed(each: Sequence[Address], name: str, called: str) -> Any:
    found = [value for one in each if (value := getattr(one, name)) not in (None, "", "/")]
    if len({str(value) for value in found}) > 1:
        raise UrlError(
            f"the broker URLs differ in their {called}: it is the same for all, so name it in the "
            "first of them alone"
        )
    return found[0] if found else None


def _provider(client: Connection) -> Any:
    return getattr(client, "credential_provider", None)  # since Kombu 5.6


def _path(scheme: str, host: str | None, path: str | None) -> str:
    if host in (None, "") and path:
        return f"/{path}"
    if host == "." and path and scheme == "embedded":
        return path
    right = {
        "socket": "delayed+socket:///path/to.sock (three slashes)",
        "embedded": "delayed+embedded:///directory, or delayed+embedded://./directory",
    }[scheme]
    raise UrlError(f"delayed+{scheme}://{host or ''}/{path or ''} names no path; write {right}")


def _ssl(scheme: str, configured: Any, in_url: dict[str, Any]) -> dict[str, Any] | None:
    if scheme not in _TLS and not configured and not in_url:
        return None
    options = {**(configured if isinstance(configured, dict) else {}), **in_url}
    check_tls_options(options)
    requirement = options.get("ssl_cert_reqs")
    if isinstance(requirement, str):
        try:
            options["ssl_cert_reqs"] = parse_ssl_cert_reqs(requirement)
        except KeyError:
            raise UrlError(
                f"ssl_cert_reqs is required, optional or none, not {requirement!r}"
            ) from None
    if isinstance(options.get("ssl_check_hostname"), str):
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() != "false"
    if "ssl_cert_reqs" in options and not options["ssl_cert_reqs"]:  # CERT_NONE or None
        options["ssl_check_hostname"] = False  # redis-py 6.0 cannot check only that
    return options


def take_credentials(client: Connection) -> None:
    """Move user and password out of the connection's host name, which Celery shows to anyone."""
    if scheme_of(client) in LISTS:
        _keep_given(client)
    if scheme_of(client) in CLUSTERS:
        client.cycle = None  # each of its nodes knows all others
    scheme, credentials, at, host = _split(client.hostname or "")
    if not at:
        return
    user, _, password = credentials.partition(":")
    client.userid = unquote(user) or client.userid
    client.password = unquote(password) or client.password
    client.hostname = f"{scheme}://{host}"


def _split(url: str) -> tuple[str, str, str, str]:
    """Return a URL's scheme, its credentials, the @ after them if there are any, and the rest."""
    scheme, _, rest = url.partition("://")
    after = _PATH if scheme.rpartition("+")[2] in _PATHS else _OPTIONS
    credentials, at, host = (place := after.split(rest, maxsplit=1)[0]).rpartition("@")
    return scheme, credentials, at, host + rest[len(place) :]


def name_server(client: Connection) -> None:
    """Make the connection's attributes name the server itself, for programs that read them.

    Of several Sentinels or nodes of a Cluster, they name the first.
    """
    try:
        _forget_the_one_before(client)
        _follow_changes(client)
        where = address(client)
    except UrlError:  # raised again when it connects
        return
    client.virtual_host = where.virtual_host or client.virtual_host
    if where.path:
        return
    if "://" in (url := _hostname(client)):
        default = where.host or "localhost", where.port
        host, client.port = (where.sentinels or where.nodes or (default,))[0]
        client.hostname = Host(host, url, _is_plain(client))
    else:
        client.hostname = url
    client.uri_prefix = None
    if str(client.transport_cls) == "delayed":
        client.transport_cls = f"delayed+{where.scheme}"


def _follow_changes(client: Connection) -> None:
    """Change the URL if another port or database was given: to a clone, or a port beside a URL."""
    scheme, is_named = scheme_of(client), isinstance(client.hostname, Host)
    if "://" not in _hostname(client) or scheme in (*LISTS, *_PATHS):
        return
    if not is_named and (len(client.alt) > 1 or not client.port):
        return
    before = address(client)
    port, database = client.port or NODE_PORT, client.virtual_host or before.virtual_host
    if not is_named:  # what the URL says comes first
        port, database = before.port or port, before.virtual_host
    if port == before.server[1] and _database(database) == _database(before.virtual_host):
        return
    _, credentials, at, rest = _split(_hostname(client))
    place, mark, query = rest.partition("?")
    host = re.sub(r":\d*$", "", place.partition("/")[0])
    path = f"{host}:{port}/{_database(database)}{mark}{query}"
    url = f"{scheme}://{credentials}{at}{path}"
    client.hostname = Host(before.host or "localhost", url, _is_plain(client))


def _database(virtual_host: Any) -> str:
    return str(virtual_host or "").strip("/") or "0"


def _forget_the_one_before(client: Connection) -> None:
    """Reset port and database, which Kombu keeps from the last URL if the next one has none."""
    if "://" in _hostname(client) or scheme_of(client) in LISTS or len(client.alt) < 2:
        return
    host, port, database = client.hostname, client.port, client.virtual_host
    each_parts = [url_to_parts(str(url).partition("delayed+")[2]) for url in client.alt]
    fitting = [
        each
        for each in each_parts
        if each.hostname == host and each.port in (None, port) and each.path in (None, database)
    ]
    if fitting:  # several on one host: the one that names the port and the database
        found = max(fitting, key=lambda each: (each.port == port, each.path == database))
        client.port = found.port
        client.virtual_host = found.path or client._initial_params["virtual_host"] or "/"


def _keep_given(client: Connection) -> None:
    """Keep what was given beside the URLs, which Kombu loses when it switches to the next one."""
    given = client._initial_params
    client.userid = client.userid or given["userid"]
    client.password = client.password or given["password"]
    if client.virtual_host in (None, "", "/"):
        client.virtual_host = given["virtual_host"]


def as_uri(client: Connection, include_password: bool, mask: str) -> str:
    """Return the broker URL of a connection, with `delayed+` only if it was given so.

    If the password is masked, the part after `?` is left out.
    """
    hostname = _hostname(client)
    if scheme_of(client) in LISTS:
        return _as_uris(client, include_password, mask)
    if "://" in hostname:
        scheme, _, rest = hostname.partition("://")
        rest = rest if include_password else rest.partition("?")[0]
    else:
        where = address(client)
        scheme, port = where.scheme, f":{where.port}" if where.port else ""
        rest = where.path or f"{where.host}{port}/{where.virtual_host or ''}".replace("//", "/")
    return f"{_prefix(client)}{scheme}://{_credentials(client, include_password, mask)}{rest}"


def _prefix(client: Connection) -> str:
    return "" if _is_plain(client) else "delayed+"


def _as_uris(client: Connection, include_password: bool, mask: str) -> str:
    """Return the URLs of the whole list, whichever of them is in use."""
    shown: list[str] = []
    for url in _listed_urls(client):
        scheme, credentials, at, host = _split(url)
        if not include_password:
            user, colon, _ = credentials.partition(":")
            credentials, host = user + (colon and f":{mask}"), host.partition("?")[0]
        if not at and not shown:  # those of a single URL were moved out of it
            credentials, at = _credentials(client, include_password, mask), ""
        shown.append(f"{_prefix(client)}{scheme}://{credentials}{at}{host}")
    return ";".join(shown)


def _credentials(client: Connection, include_password: bool, mask: str) -> str:
    if not client.userid and not client.password:
        return ""
    password = client.password() if callable(client.password) else client.password
    shown = quote(str(password), safe="") if include_password else mask
    return f"{quote(client.userid or '', safe='')}{f':{shown}' if password else ''}@"
