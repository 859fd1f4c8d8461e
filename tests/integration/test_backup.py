"""A backup has all delayed and dead messages, restores each once, and reports damage."""

from __future__ import annotations

import json
import os
import random
import re
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from celery_ext import Delayed, Query
from celery_ext.control.backup.file import HEADER, MAGIC, MESSAGES, writing
from celery_ext.control.backup.transfer import RestoreReport, inspect, restore
from celery_ext.errors import BackupError, QueryError
from kombu_delayed.inspection import backlog as backlog_module
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.store.dead_letters import UNREADABLE_NOTE
from kombu_delayed.store.store import Entry, Store
from tests.kit.backlog import check_backlog
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.state import dead_state, entry, message, state

FAR_MS = 4_000_000_000_000

Connect = Callable[..., Delayed]


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    """The delayed tasks of an app with some transport options, on this or another server."""
    made: list[Delayed] = []

    def open_delayed(url: str = "", **options: Any) -> Delayed:
        app = Celery("backup", broker=f"delayed+{url or server.url}", set_as_current=False)
        app.conf.broker_transport_options = options
        made.append(Delayed(app))
        return made[-1]

    yield open_delayed
    for each in made:
        each.close()
        each.app.close()


@pytest.fixture
def delayed(connect: Connect) -> Delayed:
    return connect(delayed_partition_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "backlog.backup"


def fill(store: Store, queue: str = "q", count: int = 60) -> None:
    """Messages of all steps, some due at one instant, some that share an id."""
    chance = random.Random(1)
    entries = [
        Entry(f"{n}", chance.choice((0, 3, 6, 9)), message(f"é{n}"), str(FAR_MS + n // 3))
        for n in range(count)
    ]
    twins = [entry("twin", FAR_MS + 7 * n, body=f"{n}") for n in range(3)]
    same = [entry("same", "+9000000", body="same") for _ in range(2)]
    store.schedule(queue, [*entries, *twins, *same])


def bury(store: Store, queue: str = "q", count: int = 5) -> None:
    """Dead letters, two of them with one id."""
    record = b"3" + message("dead").encode()
    store.deliver(queue, "A", 1, 1, lease_ms=60_000)
    store.bury(queue, "A", [(n, f"{n % (count - 1)}", f"reason {n}", record) for n in range(count)])
    store.leases.leave(queue, "A")


def everything(client: redis.Redis) -> dict[str, Any]:
    """The whole database, except how the backlog is cut into partitions."""
    found = dead_state(client)
    for queue in {key[1 : -len("}:messages")] for key in found if key.endswith("}:messages")}:
        found[f"due {queue}"] = check_backlog(client, queue)
        for key in [key for key in found if key.startswith(f"{{{queue}}}:delayed:")]:
            del found[key]
        del found[f"{{{queue}}}:partitions"]
    return found


def test_there_and_back(delayed: Delayed, client: redis.Redis, path: Path) -> None:
    assert delayed.backup(path).messages == 0
    assert delayed.restore(path) == RestoreReport()
    for queue in ("q", "other {queue}", "é"):
        fill(delayed.store, queue)
    bury(delayed.store)
    bury(delayed.store, "only the dead")
    before = everything(client)
    told: list[int] = []
    report = delayed.backup(path, progress=told.append)
    assert (report.messages, report.dead, sum(told)) == (195, 10, 205)
    assert report.queues == {"q": 70, "other {queue}": 65, "é": 65, "only the dead": 5}
    assert report.size_bytes == path.stat().st_size
    assert everything(client) == before
    client.flushall()
    for counts in ((195, 10, 0), (0, 0, 205)):
        report = delayed.restore(path)
        assert (report.messages, report.dead, report.already) == counts
        assert everything(client) == before
    client.flushall()
    assert delayed.restore(path, queue="é").queues == {"é": 65}
    assert set(delayed.counts()) - {"celery"} == {"é"}
    delayed.backup(path, queue="é")
    assert inspect(path)["queues"] == ["é"]
    with pytest.raises(QueryError, match="no queue 'q'"):
        delayed.backup(path, queue="q")
    assert inspect(path)["queues"] == ["é"]


def test_a_dead_letter_with_a_damaged_note(
    delayed: Delayed, client: redis.Redis, path: Path
) -> None:
    """It is restored as well, and so are the letters after it."""
    bury(delayed.store)
    bury(delayed.store, "z")
    for id in client.hkeys("{q}:dead-reasons"):
        client.hset("{q}:dead-reasons", id, "junk")
    before = [each.letter.id for each in delayed.dead.list()]
    delayed.backup(path)
    client.flushall()
    for counts in ((10, 0), (0, 10)):
        report = delayed.restore(path)
        assert (report.dead, report.already) == counts
    letters = [each.letter for each in delayed.dead.list()]
    assert sorted(each.id for each in letters) == sorted(before)
    assert [each.reason for each in letters].count(UNREADABLE_NOTE) == 5
    assert delayed.dead.replay() == 10


@pytest.mark.parametrize("kind", available_kinds())
def test_another_server_prefix_and_steps(
    kind: str, delayed: Delayed, connect: Connect, path: Path, tmp_path: Path
) -> None:
    fill(delayed.store, count=40)
    bury(delayed.store)
    delayed.backup(path)
    with start_server(kind, tmp_path / "other", port=0) as other, other.client() as client:
        target = connect(other.url, global_keyprefix="p:", priority_steps=[0, 5])
        assert target.restore(path).messages == 45
        assert all(key.startswith(b"p:") for key in client.keys("*"))
        assert {each.id for each in target.find()} == {each.id for each in delayed.find()}
        assert target.store.dead.count("q") == 5
        moved = Backlog(target.store, "q").reschedule([Move(f"{n}", "+0") for n in range(40)])
        assert sum(moved) == 40
        ready = [target.store.client.llen(key) for key in target.store.keys("q").ready]
        urgent = sum(each.priority < 5 for each in delayed.find() if each.id.isdigit())
        assert ready == [urgent, 40 - urgent]


def test_the_header(connect: Connect, path: Path, client: redis.Redis) -> None:
    """It has no password."""
    client.acl_setuser("ada", enabled=True, passwords=["+hush"], categories=["+@all"], keys=["*"])
    where = f"redis://ada:hush@127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"
    fill((delayed := connect(where)).store)
    delayed.backup(path)
    client.acl_deluser("ada")
    expected = {"version": 1, "queues": ["q"], "messages": 65, "dead": 0}
    facts = inspect(path)
    assert facts == {**facts, **expected, "priority_steps": [0, 3, 6, 9]}
    assert path.read_bytes().startswith(b"kombu-delayed backup 1\n")
    assert b"hush" not in path.read_bytes()


@pytest.fixture
def made(delayed: Delayed, client: redis.Redis, path: Path) -> bytes:
    """The content of a backup with several blocks; the server is empty after it."""
    fill(delayed.store)
    fill(delayed.store, "r")
    bury(delayed.store)
    delayed.backup(path)
    client.flushall()
    return path.read_bytes()


def test_every_byte_counts(delayed: Delayed, client: redis.Redis, path: Path, made: bytes) -> None:
    for at in (0, 5, *range(len(MAGIC), len(made), 11), len(made) - 1):
        damaged = bytearray(made)
        damaged[at] ^= 0x20
        path.write_bytes(damaged)
        with pytest.raises(BackupError, match=re.escape(str(path))):
            delayed.restore(path)
        path.write_bytes(made[:at])
        with pytest.raises(BackupError, match=r"is cut short|is not a backup"):
            delayed.restore(path)
    assert state(client) == {}


def test_blocks_may_not_be_missing_doubled_or_swapped(
    delayed: Delayed, client: redis.Redis, path: Path, made: bytes
) -> None:
    parts = list(split(made))
    assert [part[:1] for part in parts] == [b"H", b"M", b"D", b"M", b"E"]
    for order in ([0, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 2, 1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3]):
        path.write_bytes(MAGIC + b"".join(parts[n] for n in order))
        with pytest.raises(BackupError, match=r"is damaged at byte|is cut short"):
            delayed.restore(path)
    assert state(client) == {}


def split(made: bytes) -> Iterator[bytes]:
    at = len(MAGIC)
    while at < len(made):
        length = 13 + int.from_bytes(made[at + 5 : at + 9], "big")
        yield made[at : at + length]
        at += length


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: b"PK\x03\x04" + made, "is not a backup: it begins with b'PK"),
        (lambda made: made.replace(b"backup 1", b"backup 2", 1), "has version 2 of the format"),
        (lambda made: made + b"x", "there is data behind the end"),
        (lambda made: made[:-1], "is cut short: it ends at byte"),
        (lambda made: made[: len(MAGIC) - 1], "is cut short: it ends within its first line"),
        (lambda made: made[:40] + b"x" + made[41:], "is damaged at byte 23, block 0: its checksum"),
        (lambda made: made[:23] + b"x" + made[24:], "this is no beginning of a block"),
    ],
)
def test_the_place_is_named(
    change: Callable[[bytes], bytes], words: str, delayed: Delayed, path: Path, made: bytes
) -> None:
    path.write_bytes(change(made))
    with pytest.raises(BackupError, match=re.escape(words)):
        delayed.restore(path)


@pytest.mark.parametrize(
    ("content", "items", "words"),
    [
        (b"no zlib", 1, "error: Error -3"),
        (zlib.compress(b"\0"), 1, "error: unpack"),
        (zlib.compress(b"\xff\xff\xff\xff"), 1, "the name of a queue of 4,294,967,295 bytes"),
        (zlib.compress(b"\0\0\0\1q\0\0\0\5four"), 1, "it ends within a message"),
        (zlib.compress(b"\0\0\0\1q" + b"\0" * 12), 1, "it has more than 3 parts"),
        (zlib.compress(b"\0\0\0\1q"), 2, "it has 1 parts in place of 5"),
        (zlib.compress(b"\0\0\0\1q" + b"\0" * 8)[:-4], 1, "it ends within what is packed"),
        (zlib.compress(b"\0\0\0\1q\x7f\0\0\0"), 1, "a part of 2,130,706,432 bytes"),
    ],
)
def test_a_content_that_cannot_be_read(
    content: bytes, items: int, words: str, delayed: Delayed, path: Path
) -> None:
    """The checksums are right: another program has written it."""
    with writing(path) as writer:
        writer.header({})
        writer._block(MESSAGES, items, content)
        writer._items[MESSAGES] += items
    with pytest.raises(BackupError, match=rf"damaged at byte \d+, block 1: {words}"):
        delayed.restore(path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("items", "length"), [(1, 0), (63, 2**20)])
def test_a_small_block_that_unpacks_to_a_lot(
    items: int, length: int, delayed: Delayed, path: Path
) -> None:
    """Another program has written it: its messages restore little by little."""
    with writing(path) as writer:
        writer.header({})
        part = length.to_bytes(4, "big") + b"x" * length
        content = b"\0\0\0\1q" + part * (2**27 // len(part))
        writer._block(MESSAGES, items, zlib.compress(content, 1))
        writer._items[MESSAGES] += items
    del content
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BackupError, match="it has more than"):
            delayed.restore(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"[" * 100_000, b"x", b"\xff", b"[]"])
def test_facts_that_cannot_be_read(content: bytes, path: Path) -> None:
    with writing(path) as writer:
        writer._block(HEADER, 0, content)
    with pytest.raises(BackupError, match=r"damaged at byte \d+, block 0: "):
        inspect(path)


def test_an_interrupted_backup_leaves_what_was_there(delayed: Delayed, path: Path) -> None:
    fill(delayed.store)
    path.write_bytes(b"the one before")

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delayed.backup(path, progress=stop)
    assert path.read_bytes() == b"the one before"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_interrupted_restore_is_done_again(
    delayed: Delayed, client: redis.Redis, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 10)
    fill(delayed.store)
    before = everything(client)
    delayed.backup(path)
    client.flushall()
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delayed.restore(path, progress=stop)
    report = delayed.restore(path)
    assert report.messages + report.already == 65
    assert report.already >= 10
    assert everything(client) == before


@pytest.mark.parametrize("shards", [1, 3])
def test_what_has_run_since_an_interrupted_restore_runs_once(
    connect: Connect,
    client: redis.Redis,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
) -> None:
    """This holds until a restore reaches the end of the file; the next one restores all again."""
    monkeypatch.setattr(backlog_module, "PAGE_SIZE", 10)
    delayed = connect(delayed_shards=shards)
    store = delayed.store
    names, runs = store.shards.all("celery"), Counter[str]()
    for n in range(60):
        store.schedule(store.shards.home("celery", f"m{n}"), [entry(f"m{n}", FAR_MS + n)])
    delayed.backup(path)
    client.flushall()

    def run_all() -> None:
        delayed.run_now_many(Query(queue="celery"))
        for name in names:
            got = store.deliver(name, "w:1:x", 100, 1, lease_ms=0)
            runs.update(json.loads(record[1:])["body"] for record in got.records if got)

    def stop(count: int) -> None:
        if client.exists(*(store.keys(name).messages for name in names)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delayed.restore(path, progress=stop)
    run_all()
    assert runs
    report = delayed.restore(path)
    assert (report.messages, report.already) == (60 - len(runs), len(runs))
    run_all()
    assert runs == {f"m{n}": 1 for n in range(60)}
    assert not client.keys("*job*")
    assert not client.keys("*ledger*")
    assert delayed.restore(path).messages == 60


@pytest.mark.parametrize("kind", available_kinds())
def test_a_broker_that_ends(kind: str, connect: Connect, path: Path, tmp_path: Path) -> None:
    with start_server(kind, tmp_path / "other", port=0) as other:
        target = connect(other.url)
        for n in range(4):
            fill(target.store, f"q{n}")
        target.backup(path)
        with pytest.raises(OperationalError, match="Restore the file again"):
            restore(target, path, progress=lambda count: other.kill())


def test_a_backup_follows_links_and_takes_only_files(tmp_path: Path) -> None:
    (tmp_path / "monday").write_bytes(b"")
    (tmp_path / "latest").symlink_to(tmp_path / "monday")
    with writing(tmp_path / "latest"):
        pass
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "monday").stat().st_size > 0
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(BackupError, match="is not a file"), writing(tmp_path / name):
            pass


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the requested file; no partial file stays, and an older file is kept."""
    there, nowhere = tmp_path / "there", tmp_path / "nowhere" / "file"
    there.write_bytes(b"older")
    with pytest.raises(FileNotFoundError) as none, writing(nowhere):
        pass
    assert none.value.filename == str(nowhere)
    limit = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (4096, limit[1]))

    def write() -> None:
        with writing(there) as writer:
            for _ in range(10):
                writer.items(MESSAGES, "mail", 1, [os.urandom(4096)])

    try:
        with pytest.raises(OSError, match="File too large") as full:
            write()
    finally:
        setrlimit(RLIMIT_FSIZE, limit)
    assert full.value.filename == str(there)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("there", b"older")]
