"""Expectations, their answers and their ends, in one queue."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import redis

from kombu_delayed.errors import ServerFull
from kombu_delayed.inspection import events
from kombu_delayed.inspection.backlog import Backlog, Move
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.inspection.expectations import Correlation, Note
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.claims import deliver, full
from tests.kit.questions import KEPT_MS, TIMEOUT_MS, answer_in, ask, question, say
from tests.kit.restoring import restore
from tests.kit.state import all_keys, state

NOW_MS = 1_000


@pytest.fixture
def correlation(store: Store) -> Correlation:
    return Correlation(store, "q")


def at(correlation: Correlation, now_ms: int) -> None:
    correlation.store.now = str(now_ms)


def delivered(correlation: Correlation) -> list[str | None]:
    """The answers in the claimed messages."""
    found = deliver(correlation.store, lease_ms=500)
    return [answer_in(record[1:]) for record in found.records]


def state_of(correlation: Correlation) -> str | None:
    note = correlation.get("n")
    return note.state if note else None


def test_a_question_waits_until_its_timeout(correlation: Correlation, client: redis.Redis) -> None:
    assert correlation.expect("n", question("a", step=3), TIMEOUT_MS, KEPT_MS) == ("open", "a")
    assert check_backlog(client) == {"a": NOW_MS + TIMEOUT_MS}
    after = state(client)
    assert after["{q}:messages"] == {"a": "3" + question("a").message}
    assert after["{q}:unique"] == {"n": "a"}
    assert after["{q}:unique-due"] == {"n": NOW_MS + TIMEOUT_MS}
    assert after["{q}:wake"] == {"due": NOW_MS + TIMEOUT_MS}
    until_ms = NOW_MS + TIMEOUT_MS + KEPT_MS
    assert after["{q}:expectations-until"] == {"n": until_ms}
    note = Note("n", "open", "a", NOW_MS, until_ms, NOW_MS + TIMEOUT_MS, True)
    assert correlation.get("n") == note
    assert [*correlation.pages()] == [[note], []]


def test_an_answer_makes_it_ready(correlation: Correlation, client: redis.Redis) -> None:
    correlation.expect("n", question("a", step=3), TIMEOUT_MS, KEPT_MS)
    at(correlation, NOW_MS + 5)
    assert say(correlation, '"%1" \\ é') == ("accepted", "a")
    assert check_backlog(client) == {}
    assert client.exists("{q}:unique", "{q}:unique-due") == 0
    (text,) = client.lrange("q\x06\x163", 0, -1)
    assert json.loads(text)["due_ms"] == NOW_MS + 5
    assert answer_in(text) == '"%1" \\ é'
    assert client.zscore("{q}:wake", "now") == 0
    note = correlation.get("n")
    assert note == Note("n", "answered", "a", NOW_MS + 5, NOW_MS + 5 + KEPT_MS)


def test_what_was_answered_expires_with_its_queue(
    correlation: Correlation, client: redis.Redis
) -> None:
    ask(correlation, "a")
    client.set("{q}:expires", 60_000)
    assert say(correlation, "one").said == "accepted"
    (ready,) = client.keys("q*")
    assert 0 < client.pttl(ready) <= 60_000


@pytest.mark.parametrize("state", ["answered", "failed"])
def test_a_second_answer_is_late(correlation: Correlation, state: str) -> None:
    ask(correlation, "a")
    assert say(correlation, "one", state=state).said == "accepted"
    assert say(correlation, "two") == ("late", "a")
    assert say(correlation, "one", state=state) == ("accepted", "a"), "the same one, sent again"
    assert delivered(correlation) == ["one"]
    assert state_of(correlation) == state


@pytest.mark.parametrize("state", ["answered", "failed"])
def test_an_answer_before_its_timeout_is_settled(correlation: Correlation, state: str) -> None:
    """A consumer has the message without the answer, and learns of it when it settles."""
    ask(correlation, "a")
    at(correlation, NOW_MS + TIMEOUT_MS)
    assert delivered(correlation) == [None]
    assert say(correlation, "one", state=state) == ("accepted", "a")
    assert state_of(correlation) == state
    assert say(correlation, "one", state=state) == ("accepted", "a")
    assert say(correlation, "two") == ("late", "a")
    assert correlation.expect("n", question("b"), TIMEOUT_MS, KEPT_MS) == ("refused", "a")
    assert ask(correlation, "a") == state
    for _ in range(2):
        assert correlation.settle("n", "a", "timed_out", KEPT_MS) == (True, "one")
    assert (state_of(correlation), say(correlation, "two").said) == (state, "late")
    assert ask(correlation, "b") == "open"


def test_an_answer_after_a_timeout_outlasts_the_next_questions(correlation: Correlation) -> None:
    """The worker has died after the first message was settled, and another one settles it again."""
    for id in ("a", "b", "c"):
        ask(correlation, id)
        at(correlation, int(correlation.store.now) + TIMEOUT_MS)
        assert delivered(correlation) == [None]
        say(correlation, f"answer of {id}")
        assert correlation.settle("n", id, "timed_out", KEPT_MS) == (True, f"answer of {id}")
    for end in (say, lambda *_: correlation.cancel("n", KEPT_MS)):
        ask(correlation, f"{end}")
        end(correlation, "answer")
        for id in ("a", "b", "c"):
            assert correlation.settle("n", id, "timed_out", KEPT_MS) == (True, f"answer of {id}")
    at(correlation, int(correlation.store.now) + KEPT_MS)
    ask(correlation, "d")
    assert correlation.settle("n", "a", "timed_out", KEPT_MS) == (True, None), "it is forgotten"


def test_an_early_answer_expires_with_its_queue(
    correlation: Correlation, client: redis.Redis
) -> None:
    client.set("{q}:expires", 60_000)
    say(correlation, "one")
    assert ask(correlation, "a") == "answered"
    assert 0 < client.pttl("q") <= 60_000


def test_an_early_answer_is_kept(correlation: Correlation, client: redis.Redis) -> None:
    assert say(correlation, "one") == ("early", "")
    assert say(correlation, "one") == ("early", "")
    assert say(correlation, "two") == ("late", "")
    note = correlation.get("n")
    assert note == Note("n", "early", "", NOW_MS, NOW_MS + 5_000)
    assert [*correlation.pages()] == [[], [note]]
    at(correlation, NOW_MS + 4_999)
    assert ask(correlation, "a") == "answered"
    assert client.zscore("{q}:wake", "now") == 0
    assert check_backlog(client) == {}
    assert delivered(correlation) == ["one"]
    assert say(correlation, "one").said == "accepted"
    assert say(correlation, "two").said == "late"
    say(correlation, "early", "m")
    at(correlation, NOW_MS + 9_999)
    assert ask(correlation, "b", "m") == "open", "by then it is forgotten"
    assert client.exists("{q}:answers", "{q}:answers-until") == 0


def test_a_name_has_one_question_at_a_time(correlation: Correlation, client: redis.Redis) -> None:
    ask(correlation, "a")
    before = state(client)
    assert correlation.expect("n", question("b"), TIMEOUT_MS, KEPT_MS) == ("refused", "a")
    assert state(client) == before
    say(correlation, "one")
    assert ask(correlation, "b") == "open"
    assert say(correlation, "two") == ("accepted", "b")
    assert correlation.settle("n", "a", "answered", KEPT_MS).may_follow, (
        "the first one is not forgotten"
    )


def test_cancelling(correlation: Correlation, client: redis.Redis) -> None:
    assert correlation.cancel("n", KEPT_MS) is None
    ask(correlation, "a")
    found = correlation.cancel("n", KEPT_MS)
    assert found is not None
    assert (found.id, found.kept.due_ms) == ("a", NOW_MS + TIMEOUT_MS)
    assert correlation.cancel("n", KEPT_MS) is None
    assert check_backlog(client) == {}
    assert client.exists("{q}:unique", "{q}:unique-due") == 0
    assert say(correlation, "one") == ("late", "a")
    assert ask(correlation, "a") == "cancelled"
    assert ask(correlation, "b") == "open"


def test_others_may_move_and_drop_it(correlation: Correlation) -> None:
    backlog = Backlog(correlation.store, "q")
    ask(correlation, "a")
    later_ms = NOW_MS + 10 * KEPT_MS
    backlog.reschedule([Move("a", str(later_ms))])
    at(correlation, later_ms - 1)
    assert ask(correlation, "a") == "open"
    assert ask(correlation, "b") == "refused"
    assert say(correlation, "one") == ("accepted", "a")
    ask(correlation, "c", "m")
    backlog.cancel(["c"])
    assert say(correlation, "one", "m") == ("late", "c")


def test_a_policy_may_let_it_wait_again(correlation: Correlation, store: Store) -> None:
    ask(correlation, "a")
    at(correlation, NOW_MS + TIMEOUT_MS)
    delivered(correlation)
    store.park("q", "A", [(1, "a", NOW_MS + 2 * TIMEOUT_MS)])
    assert say(correlation, "one") == ("accepted", "a"), "nobody has dealt with its timeout"
    delivered(correlation)
    store.park("q", "A", [(1, "a", NOW_MS + 2 * TIMEOUT_MS)])
    assert say(correlation, "two") == ("late", "a")
    assert correlation.settle("n", "a", "answered", KEPT_MS).may_follow


def test_an_accepted_answer_is_not_cancelled(correlation: Correlation, store: Store) -> None:
    ask(correlation, "a")
    at(correlation, NOW_MS + TIMEOUT_MS)
    delivered(correlation)
    assert say(correlation, "one") == ("accepted", "a")
    store.park("q", "A", [(1, "a", NOW_MS + 2 * TIMEOUT_MS)])
    assert correlation.cancel("n", KEPT_MS) is None
    assert correlation.settle("n", "a", "timed_out", KEPT_MS) == (True, "one")


def test_a_backup_on_an_empty_server_takes_answers(
    correlation: Correlation, store: Store, client: redis.Redis
) -> None:
    ask(correlation, "a")
    record = client.hget("{q}:messages", "a")
    client.flushall()
    restore(store, [("a", record.decode())])
    assert ask(correlation, "b") == "refused"
    assert say(correlation, "one") == ("accepted", "a")
    assert say(correlation, "two") == ("late", "a")


def test_the_past_is_cleared(correlation: Correlation, client: redis.Redis) -> None:
    for n in range(12):
        ask(correlation, f"a{n}", f"n{n}")
        say(correlation, "one", f"n{n}")
    say(correlation, "early", "m")
    assert client.pttl("{q}:expectations") == -1
    at(correlation, NOW_MS + KEPT_MS)
    assert correlation.get("n0") is not None, "readers tell by its time"
    say(correlation, "one", "n0")
    say(correlation, "one", "n1")
    assert client.hkeys("{q}:expectations") == client.zrange("{q}:expectations-until", 0, -1) == []
    assert {*client.hkeys("{q}:answers")} == {b"n0", b"n1"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_damaged_note_counts_as_none(
    correlation: Correlation, client: redis.Redis, text: str
) -> None:
    ask(correlation, "a")
    client.hset("{q}:expectations", "n", text)
    assert correlation.get("n") is None
    assert [*correlation.pages()] == [[], []]
    assert say(correlation, "one") == ("accepted", "a")


def test_events(correlation: Correlation, store: Store) -> None:
    store.event_limit = 100
    ask(correlation, "a")
    say(correlation, "one")
    ask(correlation, "b", "m")
    correlation.cancel("m", KEPT_MS)
    told = [(each.event, each.id, each.due_ms, each.reason) for each in events.read(store, "q")]
    assert told == [
        ("scheduled", "a", NOW_MS + TIMEOUT_MS, ""),
        ("rescheduled", "a", NOW_MS, "answered"),
        ("scheduled", "b", NOW_MS + TIMEOUT_MS, ""),
        ("cancelled", "b", NOW_MS + TIMEOUT_MS, ""),
    ]


def examine(store: Store, fix: bool = False) -> dict[str, tuple[int, int]]:
    """Return kind of fault -> how many there are, and how many were repaired."""
    found = examine_queues(store, ["q"], fix=fix, patience_seconds=0)
    return {each.kind: (each.count, each.fixed) for each in found if each.kind != "silent"}


Damage = Callable[[redis.Redis], object]


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda client: client.hset("{q}:expectations", "n", "{"), "note"),
        (lambda client: client.hdel("{q}:expectations", "n"), "note"),
        (lambda client: client.zrem("{q}:expectations-until", "n"), "note"),
        (lambda client: client.hset("{q}:answers", "m", '{"state": "answered"}'), "note"),
        (lambda client: client.zrem("{q}:answers-until", "m"), "note"),
        (lambda client: client.delete("{q}:unique", "{q}:unique-due"), "unheard"),
    ],
)
def test_the_doctor_puts_notes_right(
    correlation: Correlation, client: redis.Redis, damage: Damage, kind: str
) -> None:
    store = correlation.store
    ask(correlation, "a")
    say(correlation, "early", "m")
    assert examine(store) == {}
    damage(client)
    assert examine(store) == {kind: (1, 0)}
    assert examine(store, fix=True) == {kind: (1, 1)}
    assert examine(store) == {}
    for part in ("expectations", "answers"):
        assert {*client.hkeys(f"{{q}}:{part}")} == {*client.zrange(f"{{q}}:{part}-until", 0, -1)}
    assert say(correlation, "one") == ("accepted", "a")


def test_a_full_server_takes_no_questions(correlation: Correlation, client: redis.Redis) -> None:
    ask(correlation, "a")
    ask(correlation, "b", "m")
    ask(correlation, "d", "o", 10 * TIMEOUT_MS)
    at(correlation, NOW_MS + TIMEOUT_MS)
    delivered(correlation)
    before = all_keys(client)
    with full(client):
        with pytest.raises(ServerFull):
            ask(correlation, "c", "l")
        with pytest.raises(ServerFull):
            say(correlation, "early", "k")
        assert all_keys(client) == before
        assert correlation.settle("n", "a", "timed_out", KEPT_MS).may_follow
        assert say(correlation, "one", "o").said == "accepted"
