from __future__ import annotations

import json
import pickle
import ssl
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import redis
from kombu import Connection

from kombu_delayed.connection.urls import Address, address
from kombu_delayed.errors import UrlError
from kombu_delayed.transport.alternates import check_alternates
from kombu_delayed.transport.polling.poller import Poller
from kombu_delayed.transport.transport import Transport


@pytest.fixture(autouse=True)
def _pollers_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the poller that a connection opens for its transport, even if it never connects."""
    pollers: list[Poller] = []
    start = Poller.__init__

    def tracked(self: Poller) -> None:
        start(self)
        pollers.append(self)

    monkeypatch.setattr(Poller, "__init__", tracked)
    yield
    for poller in pollers:
        poller.close()


def plain(found: Address) -> Address:
    """Remove irrelevant parts: Kombu's default port, and a host beside a path."""
    if found.path:
        return replace(found, host=None, port=None)
    return replace(found, port=found.port or 6379)


def _at(*sentinels: tuple[str, int], scheme: str = "sentinel", **more: Any) -> Address:
    return Address(scheme, sentinels=sentinels, **{"virtual_host": "/", **more})


def _nodes(*nodes: tuple[str, int], scheme: str = "rediscluster", **more: Any) -> Address:
    return Address(scheme, nodes=nodes, **{"virtual_host": "/", **more})


LIST = "sentinel://u:secret@a:1/2;delayed+sentinel://b;delayed+sentinel://c:3"
AT_A_B_AND_C = (("a", 1), ("b", 26379), ("c", 3))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("://", Address("redis", "localhost", virtual_host="/")),
        ("+redis://", Address("redis", virtual_host="/")),
        ("+redis://host:6380/3", Address("redis", "host", 6380, virtual_host="3")),
        ("+redis://u:p%40%2Fw@h:1/2", Address("redis", "h", 1, "u", "p@/w", virtual_host="2")),
        ("+redis://:a+b@h/0", Address("redis", "h", password="a+b", virtual_host="0")),
        ("+redis://[::1]:6379/0", Address("redis", "::1", 6379, virtual_host="0")),
        ("+redis://h/0?virtual_host=5", Address("redis", "h", virtual_host="5")),
        (
            "+redis://h/0?heartbeat=10&connect_timeout=4&insist=1&login_method=PLAIN",
            Address("redis", "h", virtual_host="0"),
        ),
        (
            "+redis://h/0?credential_provider=a.b",
            Address("redis", "h", virtual_host="0", credential_provider="a.b"),
        ),
        ("+rediss://h/0", Address("rediss", "h", virtual_host="0", ssl={})),
        (
            "+socket://u:pw@/tmp/x.sock?virtual_host=2",
            Address("socket", None, None, "u", "pw", "/tmp/x.sock", "2"),
        ),
        ("+embedded:///var/d", Address("embedded", path="/var/d", virtual_host="/")),
        ("+embedded://./d/e", Address("embedded", ".", path="d/e", virtual_host="/")),
        ("+sentinel://", _at(("localhost", 26379))),
        (f"+{LIST}", _at(*AT_A_B_AND_C, username="u", password="secret", virtual_host="2")),
        ("+sentinel://a;delayed+sentinel://a/2", _at(("a", 26379), virtual_host="2")),
        (
            "+sentinels://a?ssl_ca_certs=ca;delayed+sentinels://b",
            _at(("a", 26379), ("b", 26379), scheme="sentinels", ssl={"ssl_ca_certs": "ca"}),
        ),
        # The nodes of a Cluster after the first may be without a scheme.
        (
            "+rediscluster://u:secret@a:7000;b:7001",
            _nodes(("a", 7000), ("b", 7001), username="u", password="secret"),
        ),
        ("+rediscluster://a", _nodes(("a", 6379))),
        (
            "+redisclusters://a/0;delayed+redisclusters://b?ssl_ca_certs=ca",
            _nodes(
                *(("a", 6379), ("b", 6379)),
                scheme="redisclusters",
                virtual_host="0",
                ssl={"ssl_ca_certs": "ca"},
            ),
        ),
    ],
)
def test_forms(url: str, expected: Address) -> None:
    connection = Connection(f"delayed{url}")
    assert address(connection) == expected
    assert plain(address(connection.clone())) == plain(expected)
    assert plain(address(connection.clone().clone())) == plain(expected)
    assert "secret" not in connection.as_uri()
    if expected.nodes:
        assert connection.cycle is None, "each of the nodes knows all others"
        check_alternates(connection.alt)
    for each in connection.alt if expected.sentinels else ():
        connection.switch(each)
        assert address(connection) == expected


def named(connection: Connection) -> tuple[Any, ...]:
    info = connection.info()
    return info["hostname"], info["port"], info["virtual_host"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://u:p@h:6380", ("h", 6380, "/")),
        ("redis://h/2?virtual_host=5", ("h", 6379, "5")),
        ("rediss://h:1/0?ssl_cert_reqs=none", ("h", 1, "0")),
        ("socket:///tmp/x.sock", ("delayed+socket:///tmp/x.sock", 6379, "/")),
        ("embedded:///var/d", ("delayed+embedded:///var/d", 6379, "/")),
        ("sentinels://:p@a:5/1;delayed+sentinels://b", ("a", 5, "1")),
        ("rediscluster://a:7000;b:7001", ("a", 7000, "/")),
        ("redis://a:1/1;delayed+redis://b", ("a", 1, "1")),
        # An @ may be part of a path.
        ("rediss://u:p@h:1/0?ssl_ca_certs=/home/a@b.c/ca", ("h", 1, "0")),
        ("sentinels://:p@a:5/1?ssl_ca_certs=/a@b/ca;delayed+sentinels://b", ("a", 5, "1")),
        ("socket://u:p@/run/a@1/x.sock", ("delayed+socket:///run/a@1/x.sock", 6379, "/")),
        ("embedded://./a@b", ("delayed+embedded://./a@b", 6379, "/")),
    ],
)
def test_a_connection_names_its_server(url: str, expected: tuple[Any, ...]) -> None:
    connection = Connection(f"delayed+{url}")
    where, uri = address(connection), connection.as_uri(include_password=True)
    clone = connection.clone()
    again = pickle.loads(pickle.dumps(connection))
    for each in (connection, clone, clone.clone(), again, copy(connection)):
        assert named(each) == named(each) == expected
        if "socket" not in url and "embedded" not in url:
            assert (each.hostname, each.port or 6379, each.virtual_host) == expected
        assert plain(address(each)) == plain(where)
        assert each.as_uri(include_password=True) == uri
        assert each.as_uri() == connection.as_uri()
    assert json.loads(json.dumps(expected[0])) == str(connection.info()["hostname"])


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h/",
        "redis://u:p@[::1]:7/0",
        "rediss://h:7/0?ssl_ca_certs=/a@b/ca.pem",
    ],
)
def test_a_clone_may_have_another_database_or_port(url: str) -> None:
    connection = Connection(f"delayed+{url}")
    where = address(connection)
    assert connection.transport
    for given in ({"virtual_host": "3"}, {"port": 8}, {"port": 8, "virtual_host": 3}):
        clone = connection.clone(**given)
        for each in (clone, clone.clone(), pickle.loads(pickle.dumps(clone))):
            assert each.transport
            found = address(each)
            assert (str(found.virtual_host).strip("/") or "0") == str(given.get("virtual_host", 0))
            assert found.server == (where.server[0], given.get("port", where.server[1]))
            expected = replace(where, port=found.port, virtual_host=found.virtual_host)
            assert plain(found) == plain(expected)
            assert Connection(each.as_uri(include_password=True)).as_uri() == each.as_uri()
    assert plain(address(connection)) == plain(where)


@pytest.mark.parametrize("transport", ["delayed", "delayed+redis", "kombu_delayed:Transport"])
@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://u:secret@h:6380/3", "redis://u:**@h:6380/3"),
        ("rediss://h:1/0?ssl_cert_reqs=none", "rediss://h:1/0"),
        ("socket:///tmp/x.sock?virtual_host=2", "socket:///tmp/x.sock"),
        ("embedded:///var/d", "embedded:///var/d"),
        ("sentinel://u:secret@a:5/1", "sentinel://u:**@a:5/1"),
        ("rediscluster://a:7000", "rediscluster://a:7000"),
    ],
)
def test_the_transport_may_come_beside_a_plain_url(url: str, masked: str, transport: str) -> None:
    """Callers that ask for the URL get it as it was given: many tools know only `redis://`."""
    connection = Connection(url, transport=transport)
    assert isinstance(connection.transport, Transport)
    where = plain(address(connection))
    assert where == plain(address(Connection(f"delayed+{url}")))
    clone, again = connection.clone(), pickle.loads(pickle.dumps(connection))
    for each in (connection, clone, clone.clone(), again, copy(connection)):
        assert isinstance(each.transport, Transport)
        assert plain(address(each)) == where
        assert each.as_uri() == masked
        assert each.as_uri(include_password=True) == url
        check_alternates(each.alt)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("redis://h", 8),
        ("redis://h/2", 8),
        ("redis://", 8),
        ("redis://[::1]", 8),
        ("redis://h:7", 7),
    ],
)
def test_a_port_may_come_beside_a_url(given: str, expected: int) -> None:
    connection = Connection(f"delayed+{given}", port=8)
    assert connection.transport
    for each in (connection, connection.clone(), Connection(connection.as_uri())):
        assert each.transport
        assert (address(each).port, each.port) == (expected, expected)
        assert str(address(each).virtual_host).strip("/") in ("2" if "2" in given else ("", "0"))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("redis://h", "redis://h:7", (7, "0")),
        ("redis://h:7/1", "redis://h:7/2", (7, "2")),
        ("redis://h/1", "redis://h:7/2", (7, "2")),
        ("redis://h:7/1", "redis://i", (6379, "0")),
    ],
)
def test_servers_of_a_list_may_be_on_one_host(first: str, second: str, expected: Any) -> None:
    urls = [f"delayed+{first}", f"delayed+{second}"]
    connection = Connection(urls)
    assert connection.transport
    connection.maybe_switch_next()
    for each in (connection, connection.clone()):
        assert each.transport
        where = address(each)
        found = where.server[1], str(where.virtual_host).strip("/") or "0"
        assert found == expected


def test_a_list_of_urls_names_the_transport_in_each() -> None:
    """Kombu takes the transport from the URL that it switches to."""
    connection = Connection("redis://a;redis://b", transport="delayed")
    with pytest.raises(UrlError, match=r"write delayed\+redis://a"):
        check_alternates(connection.alt)


def test_parts_may_come_beside_the_url() -> None:
    parts: dict[str, Any] = {"userid": "u", "password": "p", "virtual_host": 7}
    connection = Connection("delayed+redis://h", **parts)
    assert address(connection) == Address("redis", "h", None, "u", "p", virtual_host=7)
    connection = Connection("delayed+redis://a:b@h/1", **parts)
    assert address(connection) == Address("redis", "h", None, "a", "b", virtual_host="1")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://x", "there is no delayed+http:// broker URL; it is delayed+redis://["),
        ("redis://h:port/0", "cannot read the broker URL"),
        ("redis://h:99999/0", "cannot read the broker URL"),
        ("redis://h/0?socket_timeout=1", "the broker URL takes no option 'socket_timeout' after"),
        ("rediss://h/0?ssl_ca_cert=ca", "unknown TLS option 'ssl_ca_cert'; did you mean 'ssl_ca_c"),
        ("rediss://h/0?ssl_x=1", "unknown TLS option 'ssl_x'; there are ssl_ca_certs, ssl_ca_data"),
        ("rediss://h/0?ssl_cert_reqs=x", "ssl_cert_reqs is required, optional or none, not 'x'"),
        (
            "socket://tmp/x.sock",
            "delayed+socket://tmp/x.sock names no path; write delayed+socket:///path/to.sock "
            "(three slashes)",
        ),
        (
            "embedded://directory",
            "delayed+embedded://directory/ names no path; write delayed+embedded:///directory, "
            "or delayed+embedded://./directory",
        ),
    ],
)
def test_wrong_form_names_the_right_one(url: str, text: str) -> None:
    with pytest.raises(UrlError) as caught:
        address(Connection(f"delayed+{url}"))
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "url",
    [
        "delayed+redis://u:secret@h:99999/0",
        "delayed+redis://u:secret@h/0?bad=1",
        "delayed+http://u:secret@h/0",
        "delayed+socket://u:secret@tmp/x",
        "delayed+redis://u:sec/secret@h:1/0",
    ],
)
def test_errors_keep_the_password_to_themselves(url: str) -> None:
    with pytest.raises(UrlError) as caught:
        address(Connection(url))
    assert "secret" not in str(caught.value)


# Sentinels.


def test_what_is_given_beside_sentinels_outlasts_a_switch() -> None:
    urls = ["delayed+sentinel://a", "delayed+sentinel://b"]
    connection = Connection(urls, userid="u", password="p", virtual_host=7)
    expected = _at(("a", 26379), ("b", 26379), username="u", password="p", virtual_host=7)
    assert address(connection) == expected
    connection.switch(urls[1])
    assert address(connection) == expected
    assert address(connection.clone()) == expected


@pytest.mark.parametrize(
    ("other", "what"),
    [("x:secret@b", "user"), ("u:other@b", "password"), ("b/3", "database")],
)
def test_sentinels_that_would_lead_elsewhere(other: str, what: str) -> None:
    with pytest.raises(UrlError, match=f"the broker URLs differ in their {what}") as e:
        address(Connection(f"delayed+sentinel://u:secret@a/2;delayed+sentinel://{other}"))
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://u:secret@h:1/2", "redis://u:**@h:1/2"),
        ("socket://u:secret@/run/a@1/x.sock", "socket://u:**@/run/a@1/x.sock"),
        ("rediss://:secret@h/0?ssl_cert_reqs=none", "rediss://:**@h/0"),
        ("socket://:secret@/tmp/x.sock", "socket://:**@/tmp/x.sock"),
        ("redis://u:secret@a/0;delayed+redis://u:secret@b/0", "redis://u:**@a/0"),
        ("sentinel://:secret@a:1?ssl_ca_certs=x", "sentinel://:**@a:1"),
        (LIST, LIST.replace("secret", "**")),
        (
            "sentinel://:secret@a;delayed+sentinel://:secret@b",
            "sentinel://:**@a;delayed+sentinel://:**@b",
        ),
    ],
)
def test_password_is_masked(url: str, masked: str) -> None:
    connection = Connection(f"delayed+{url}")
    assert connection.as_uri() == f"delayed+{masked}"
    for each in (None, *connection.alt):
        if each:
            connection.switch(each)
        assert "secret" not in repr(connection)
        assert "secret" not in repr(address(connection))  # error trackers show local variables
        assert "secret" not in connection.clone().as_uri()
        assert "secret" in connection.clone().as_uri(include_password=True)
        if url.startswith("sentinel"):
            assert connection.as_uri() == f"delayed+{masked}"
            assert connection.clone().as_uri(include_password=True) == f"delayed+{url}"


@pytest.mark.parametrize(
    ("alternates", "text"),
    [
        (
            ["delayed+sentinel://a", "u:secret@b:1"],
            "each Sentinel has a URL of its own: write delayed+sentinel://b:1",
        ),
        (
            ["delayed+sentinel://a", "delayed+redis://b"],
            "the broker URLs begin with delayed+redis:// and delayed+sentinel://; a list is either "
            "of Sentinels, all with the same beginning, or of servers",
        ),
        (["delayed+sentinel://a", "sentinel://b"], "a failover URL begins with sentinel://"),
        (
            ["delayed+redis://a/0", "redis://u:secret@b:1/0"],
            "a failover URL begins with redis://, so Kombu would leave this transport; "
            "write delayed+redis://b:1/0",
        ),
    ],
)
def test_lists_that_lead_nowhere(alternates: list[str], text: str) -> None:
    with pytest.raises(UrlError) as caught:
        check_alternates(alternates)
    assert str(caught.value).startswith(text)


def test_a_cluster_has_one_database() -> None:
    with pytest.raises(UrlError, match="a Cluster has no database 3, only 0: leave it out"):
        address(Connection("delayed+rediscluster://a/3"))


# Certificates.


def test_certificates_are_required_unless_told_otherwise() -> None:
    found = address(Connection("delayed+rediss://h/0"))
    assert redis.SSLConnection(**(found.ssl or {})).cert_reqs == ssl.CERT_REQUIRED
    assert redis.SSLConnection(**(found.ssl or {})).check_hostname


def test_files_and_host_name_check_in_the_url() -> None:
    query = "ssl_ca_certs=%2Fca.pem&ssl_certfile=c&ssl_keyfile=k&ssl_check_hostname=False"
    assert address(Connection(f"delayed+rediss://h/0?{query}")).ssl == {
        "ssl_ca_certs": "/ca.pem",
        "ssl_certfile": "c",
        "ssl_keyfile": "k",
        "ssl_check_hostname": False,
    }


#: redis-py 6.0 does not connect if it should check the host name alone.
UNCHECKED = {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "configured", "expected"),
    [
        ("redis://h", False, None),
        ("redis://h", True, {}),
        ("redis://h?ssl_ca_certs=ca", False, {"ssl_ca_certs": "ca"}),
        ("redis://h", {"ssl_ca_certs": "ca"}, {"ssl_ca_certs": "ca"}),
        ("rediss://h?ssl_cert_reqs=none", False, UNCHECKED),
        ("rediss://h", {"ssl_cert_reqs": "none"}, UNCHECKED),
        ("rediss://h", {"ssl_cert_reqs": ssl.CERT_NONE}, UNCHECKED),
        ("rediss://h", {"ssl_cert_reqs": "none", "ssl_check_hostname": "true"}, UNCHECKED),
        (
            "rediss://h?ssl_cert_reqs=required",
            {"ssl_cert_reqs": "none", "ssl_ca_certs": "ca"},
            {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "ca"},
        ),
    ],
)
def test_broker_use_ssl(url: str, configured: Any, expected: dict[str, Any] | None) -> None:
    given = copy(configured)
    assert address(Connection(f"delayed+{url}", ssl=configured)).ssl == expected
    assert configured == given


def test_broker_use_ssl_for_another_transport() -> None:
    """Those of RabbitMQ have no ssl_ in front."""
    connection = Connection("delayed+rediss://h", ssl={"keyfile": "k", "ssl_ca_certs": "ca"})
    with pytest.raises(UrlError, match="unknown TLS option 'keyfile'; did you mean 'ssl_keyfile'"):
        address(connection)


# Failover.

FAILOVER = [
    ("delayed+redis://u:p@h:1/2", Address("redis", "h", 1, "u", "p", virtual_host="2")),
    (
        "delayed+rediss://h/3?ssl_cert_reqs=none",
        Address("rediss", "h", virtual_host="3", ssl=UNCHECKED),
    ),
    ("delayed+rediss://h/3", Address("rediss", "h", virtual_host="3", ssl={})),
    ("delayed+socket:///tmp/x.sock", Address("socket", path="/tmp/x.sock")),
    ("delayed+embedded:///var/d", Address("embedded", path="/var/d")),
    ("delayed+embedded://./d", Address("embedded", path="d")),
]


@pytest.mark.parametrize(("url", "expected"), FAILOVER)
def test_failover_there_and_back(url: str, expected: Address) -> None:
    connection = Connection(f"delayed+redis://u:p@first:1/5;{url}")
    first = address(connection)
    connection.switch(url)
    for each in (connection, connection.clone(), connection.clone().clone()):
        assert plain(address(each)) == plain(expected)
    assert type(connection.transport).__module__ == "kombu_delayed.transport.transport"
    connection.switch(connection.alt[0])
    assert address(connection) == first


def test_alternates_with_the_whole_scheme_are_fine() -> None:
    check_alternates([url for url, _ in FAILOVER])
    check_alternates([])
    check_alternates(["host-without-scheme"])


@pytest.mark.parametrize("query", ["virtual_host=4", "bad=1"])
def test_alternate_that_kombu_could_not_switch_to(query: str) -> None:
    url = f"delayed+socket:///tmp/x.sock?{query}"
    with pytest.raises(TypeError):
        Connection(f"delayed+redis://a/0;{url}").switch(url)
    with pytest.raises(UrlError):
        check_alternates(["delayed+redis://a/0", url])
