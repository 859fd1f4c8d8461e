"""Callbacks: allowed targets, and the parts of the answer that are trusted."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from celery_ext.http import SignatureError, verify
from celery_ext.http.callbacks import connections
from celery_ext.http.callbacks.post import Answer, CallbackFailed, post
from celery_ext.http.callbacks.signature import sign
from celery_ext.http.callbacks.ssrf_guard import (
    CallbackRefused,
    check_form,
    is_allowed,
    is_public,
    resolve,
    split,
)
from tests.kit.receiver import Receiver, receiving
from tests.kit.servers import make_certificate

#: Refused before a DNS query.
BAD_FORMS = {
    "no URL of the web": """
        example.com //example.com/ ftp://example.com/ file:///etc/passwd
        gopher://example.com:70/ http:// http:///x http://:80/ http://[::1/
    """,
    "a user": """
        http://user@example.com/ http://user:password@example.com/ http://example.com@127.0.0.1/
        http://example.com\\@127.0.0.1/
    """,
    "a port": "http://example.com:0/ http://example.com:65536/ http://example.com:x/",
    "a name": """
        http://exa_mple..com/ http://-example.com/ http://127.0.0.1%00.example.com/
        http://example.com/ü
    """,
    "127.0.0.1, however it is written": """
        http://127.0.0.1/ http://127.1/ http://0/ http://0.0.0.0/ http://2130706433/
        http://017700000001/ http://0177.0.0.1/ http://0x7f000001/ http://0x7f.0.0.1/
        http://127.0.0.1.:80/ http://①②⑦.⓪.⓪.①/ http://127。0。0。1/
    """,
    "addresses of IPv4": """
        http://10.0.0.1/ http://172.16.0.1/ http://172.31.255.255/ http://192.168.1.1/
        http://169.254.169.254/latest/meta-data/ http://100.100.100.200/ http://168.63.129.16/
        http://192.0.0.192/ http://198.18.0.1/ http://224.0.0.1/ http://240.0.0.1/
        http://255.255.255.255/
    """,
    "addresses of IPv6": """
        http://[::1]/ http://[::]/ http://[0:0:0:0:0:0:0:1]/ http://[fe80::1]/
        http://[fe80::1%25eth0]/ http://[fec0::1]/ http://[fc00::1]/ http://[fd00:ec2::254]/
        http://[ff02::1]/ http://[2001:db8::1]/
    """,
    "addresses of IPv4 in those of IPv6": """
        http://[::ffff:127.0.0.1]/ http://[::ffff:7f00:1]/ http://[::127.0.0.1]/
        http://[64:ff9b::7f00:1]/ http://[64:ff9b:1::a00:1]/ http://[2002:7f00:1::]/
        http://[2001:0:4136:e378:8000:63bf:80ff:fffe]/ http://[2a00:1450::5efe:127.0.0.1]/
    """,
}

WITH_SPACES = ["", "http://exam ple.com/", "http://example.com/\r\nHost: x"]

#: Well-formed, but the name leads to a forbidden address.
BAD_ADDRESSES = """
    127.0.0.1 10.1.2.3 169.254.169.254 0.0.0.0 100.64.0.1
    ::1 ::ffff:10.0.0.1 fd00::1 fe80::1%eth0 64:ff9b::a00:1
"""


def leads_to(*addresses: str) -> Callable[..., Any]:
    def getaddrinfo(host: str, port: int, **more: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    asked: list[str] = []
    getaddrinfo.asked = asked  # type: ignore[attr-defined]
    return getaddrinfo


@pytest.mark.parametrize("url", [*" ".join(BAD_FORMS.values()).split(), *WITH_SPACES])
def test_bad_forms(url: str) -> None:
    with pytest.raises(CallbackRefused):
        check_form(url)


@pytest.mark.parametrize("address", BAD_ADDRESSES.split())
def test_names_that_lead_inside(address: str) -> None:
    target = check_form("https://rebind.example.com/x")
    for found in ([address], ["93.184.215.14", address]):
        with pytest.raises(CallbackRefused, match="not public"):
            resolve(target, (), leads_to(*found))


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://example.com", "example.com", 80, "/"),
        ("https://Example.COM/a?b=c#d", "example.com", 443, "/a?b=c"),
        ("https://example.com:8443/", "example.com", 8443, "/"),
        ("https://bücher.example/", "xn--bcher-kva.example", 443, "/"),
        ("http://93.184.215.14/", "93.184.215.14", 80, "/"),
        ("http://[2606:2800:21f:cb07::1]:81/", "2606:2800:21f:cb07::1", 81, "/"),
        ("http://a_b.example.com/", "a_b.example.com", 80, "/"),
    ],
)
def test_good_urls(url: str, host: str, port: int, path: str) -> None:
    found = check_form(url)
    assert (found.host, found.port, found.path) == (host, port, path)
    answers = leads_to("93.184.215.14")
    assert resolve(found, (), answers) == [(socket.AF_INET, ("93.184.215.14", port))]
    assert answers.asked == [host]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "allow", "expected"),
    [
        ("http://10.0.0.1/", ["10.0.0.1"], True),
        ("http://10.0.0.1:81/", ["10.0.0.1:80"], False),
        ("http://hooks.inner/", ["*.inner"], True),
        ("http://hooks.inner./", ["Hooks.INNER"], True),
        ("http://inner.evil.example/", ["*.inner"], False),
        ("http://[::1]:80/", ["::1"], True),
        ("http://10.0.0.1/", [], False),
    ],
)
def test_allowed_by_name(url: str, allow: list[str], expected: bool) -> None:
    assert is_allowed(split(url), allow) == expected
    if expected:
        assert resolve(check_form(url, allow), allow, leads_to("10.0.0.1"))


def test_public_addresses() -> None:
    for each in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::200e"):
        assert is_public(each)
    assert not is_public("example.com")


# Posting.


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def call(receiver: Receiver, path: str, seconds: float = 5, **headers: str) -> Answer:
    target = split(receiver.url(path))
    addresses = [(socket.AF_INET, ("127.0.0.1", receiver.port))]
    return post(target, addresses, b"{}", headers, seconds=seconds, limit_bytes=100)


def drip(handler: Any) -> None:
    """Send bytes, one after the other, for ever."""
    try:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            handler.wfile.write(b"y")
            handler.wfile.flush()
            time.sleep(0.02)
    except OSError:
        pass


def negative_chunk(handler: Any) -> None:
    """Send a chunk that the library would read to the end of the connection, without a limit."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n")
    handler.wfile.write(b"x" * 300)
    handler.close_connection = True


ANSWERS: list[tuple[Any, Any]] = [
    ((200, b'{"code": 100}', {}), Answer(100)),
    ((200, b'{"code": 101}', {}), Answer(101)),
    ((200, b'{"code": 101}', {"Retry-After": "7"}), Answer(101, 7.0)),
    ((200, b'{"code": 101}', {"Retry-After": "x"}), Answer(101)),
    ((200, b'{"code": 101}', {"Retry-After": "9" * 400}), Answer(101)),
    ((200, b'{"code": 101}', {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), Answer(101, 0.0)),
    ((200, b'{"code": 102}', {}), "code 102"),
    ((200, b'{"code": "100"}', {}), 'no "code"'),
    ((200, b"[100]", {}), 'no "code"'),
    ((200, b"", {}), "not JSON"),
    ((200, b"\xff", {}), "not JSON"),
    ((500, b'{"code": 100}', {}), "status 500"),
    ((302, b'{"code": 100}', {"Location": "http://169.254.169.254/"}), "status 302"),
    ((200, b'{"code": 100}' + b" " * 100, {}), "longer than 100 bytes"),
    ((200, b'{"code": 100}', {"x": "y" * 70_000}), "LineTooLong"),
    (drip, "no answer within 0.3 s"),
    (negative_chunk, "HTTPException: a chunk of -1 bytes"),
]


@pytest.mark.parametrize(("given", "expected"), ANSWERS)
def test_answers(receiver: Receiver, given: Any, expected: Any) -> None:
    path = f"/{len(receiver.got)}"
    receiver.answers[path] = given
    if isinstance(expected, Answer):
        assert call(receiver, path) == expected
    else:
        with pytest.raises(CallbackFailed, match=expected):
            call(receiver, path, seconds=0.3 if given is drip else 5)
    assert len(receiver.at(path)) == 1


@pytest.fixture(params=["Asia/Tokyo", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


def test_a_date_without_a_zone_is_in_utc(receiver: Receiver, zone: None) -> None:
    """One of the three forms of a date in HTTP has no zone."""
    date = time.asctime(time.gmtime(time.time() + 7_200))
    receiver.answers["/busy"] = (200, b'{"code": 101}', {"Retry-After": date})
    assert call(receiver, "/busy").retry_after == pytest.approx(7_200, abs=600)


def test_nobody_is_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there = ("127.0.0.1", closed.getsockname()[1])
        with pytest.raises(CallbackFailed, match="refused"):
            post(split("http://x/"), [(socket.AF_INET, there)], b"", {}, seconds=5, limit_bytes=9)


def test_the_time_is_for_all_of_it(receiver: Receiver) -> None:
    """Tested with addresses that do not answer, and then one that answers for ever."""
    receiver.answers["/late"] = drip
    with socket.socket() as silent, ExitStack() as full:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):  # no more are let in
            full.enter_context(_begin(silent.getsockname()))
        there = [silent.getsockname()] * 3 + [("127.0.0.1", receiver.port)]
        addresses = [(socket.AF_INET, each) for each in there]
        target = split(f"http://x:{receiver.port}/late")
        with pytest.raises(CallbackFailed, match="no answer within 1 s"):
            post(target, addresses, b"{}", {}, seconds=1, limit_bytes=9)


def _begin(address: Any) -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(address)
    return made


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with receiving(context, keeps=True) as receiver:
        there = [(socket.AF_INET, ("127.0.0.1", receiver.port))]

        def call(host: str) -> Answer:
            target = split(f"https://{host}:{receiver.port}/tls")
            return post(target, there, b"{}", {}, seconds=10, limit_bytes=99)

        with pytest.raises(CallbackFailed, match="self-signed certificate"):
            call("127.0.0.1")
        trusting = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(connections, "_tls", lambda: trusting)
        assert call("127.0.0.1").code == 100
        before = receiver.connections
        assert call("127.0.0.1").code == 100
        assert receiver.connections == before  # it was kept, TLS and all
        with pytest.raises(CallbackFailed, match="Hostname mismatch"):
            call("hooks.example.com")
        assert len(receiver.at("/tls")) == 2


def test_a_handshake_that_does_not_end() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        there = [(socket.AF_INET, silent.getsockname())]
        with pytest.raises(CallbackFailed, match=r"no answer within 0\.3 s"):
            post(split("https://x/"), there, b"{}", {}, seconds=0.3, limit_bytes=9)


def test_it_goes_to_the_address_that_was_checked(receiver: Receiver) -> None:
    target = split(f"http://rebind.example.com:{receiver.port}/checked")
    there = [(socket.AF_INET, ("127.0.0.1", receiver.port))]
    assert post(target, there, b"{}", {}, seconds=5, limit_bytes=99).code == 100
    headers = next(headers for path, headers, _ in receiver.got if path == "/checked")
    assert headers["Host"] == f"rebind.example.com:{receiver.port}"


# Signatures.


def test_signatures() -> None:
    headers = sign(["new", "old"], b"body", now=1_000)
    for secret in ("new", "old"):
        verify(secret, headers, b"body", now=1_100)
        verify(secret, {name.upper(): value for name, value in headers.items()}, b"body", now=900)
    for wrong in (
        ("other", headers, b"body", 1_000),
        ("new", headers, b"another", 1_000),
        ("new", {**headers, "Delayed-Timestamp": "1001"}, b"body", 1_000),
        ("new", headers, b"body", 1_301),
        ("new", headers, b"body", 699),
        ("new", {}, b"body", 1_000),
        ("new", {"Delayed-Signature": "v1=ü", "Delayed-Timestamp": "x"}, b"body", 1_000),
    ):
        secret, given, body, now = wrong
        with pytest.raises(SignatureError):
            verify(secret, given, body, now=now)
    assert sign([], b"body") == {}
