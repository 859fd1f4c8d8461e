"""Workers' counts of tasks by time slot, which stay correct if a count is sent twice."""

from __future__ import annotations

import pytest
import redis

from kombu_delayed.store.outcomes.tallies import BOUNDS_MS, LEVELS, Slot, Tallies, Tally, slots
from kombu_delayed.store.store import Store

#: Five minutes before the end of an hour, a day and a week.
AT = 604_800 * 3_000 - 300


def write(store: Store, tallies: Tallies, worker: str = "w:1:a") -> list[int]:
    answers = store.all_of(tallies.calls(store, "q", worker))
    tallies.were_written()
    return answers


def found(store: Store, level: str, now: float) -> dict[tuple[int, str], Tally]:
    return {(each.at, each.task): each.tally for each in slots(store, ["q"], level, now)}


def test_counted_by_minutes_quarters_and_hours(store: Store) -> None:
    tallies = Tallies()
    for n in range(10):  # past the end of all periods
        tallies.began("mail", AT + n * 60, 40 * n)
        tallies.ended("mail", AT + n * 60, "+", 200)
    tallies.ended("mail", AT, "-", 5_000)
    tallies.ended("pay", AT, "~", None)
    tallies.ended("pay", AT, "x", None)
    assert write(store, tallies) == [1]
    now = AT + 600
    minutes = found(store, "hour", now)
    assert {at for at, task in minutes if task == "mail"} == {AT + n * 60 for n in range(10)}
    first, other = minutes[AT, "mail"], minutes[AT, "pay"]
    assert [first.end(state) for state in "+-~x"] == [1, 1, 0, 0]
    assert [other.end(state) for state in "+-~x"] == [0, 0, 1, 1]
    assert (first.ended, other.ended) == (2, 1)
    assert first.mean_run_seconds == 2.6
    assert other.mean_run_seconds is other.run_seconds(0.5) is other.late_seconds(0.5) is None
    for level, places in (("day", [AT - 600, AT + 300]), ("week", [AT - 6_900, AT + 300])):
        assert sorted(at for at, task in found(store, level, now) if task == "mail") == places
    for level in LEVELS:
        whole = sum((each for each in found(store, level, now).values()), Tally())
        assert [whole.end(state) for state in "+-~x"] == [10, 1, 1, 1]
        assert 0.1 < (whole.late_seconds(0.5) or 0) < 0.3


def test_only_what_a_level_is_about(store: Store) -> None:
    tallies = Tallies()
    for ago in (0, 3_500, 3_700, 80_000, 90_000, 600_000, 700_000):
        tallies.ended("mail", AT - ago, "+", 1)
    write(store, tallies)
    counts = {
        level: sum(each.ended for each in found(store, level, AT).values()) for level in LEVELS
    }
    assert counts == {"hour": 2, "day": 4, "week": 6}


def test_sent_twice_and_by_two_workers(store: Store) -> None:
    mine, others = Tallies(), Tallies()
    for each in (mine, others):
        each.ended("mail", AT, "+", 1)
    calls = mine.calls(store, "q", "w:1:a")
    assert store.all_of(calls) == [1]
    mine.ended("mail", AT, "+", 1)  # meanwhile
    assert store.all_of(mine.calls(store, "q", "w:1:a")) == [0]  # the answer was lost
    mine.were_written()
    assert write(store, others, "w:2:b") == [1]
    assert write(store, mine) == [1]
    assert write(store, mine) == []
    assert found(store, "hour", AT)[AT, "mail"].end("+") == 3


def test_bounded_and_gone_in_time(store: Store, client: redis.Redis) -> None:
    tallies = Tallies()
    for n in range(4_990):
        tallies.ended(f"task{n}", AT, "+", 1)
    write(store, tallies)
    for n in range(3):
        tallies.ended(f"other{n}", AT, "+", 1)
    write(store, tallies)
    minutes = found(store, "hour", AT)
    assert len(minutes) == 4_001
    assert minutes[AT, ""].end("+") == 993
    keys = client.keys("*rates*")
    assert len(keys) == len(LEVELS)
    assert all(0 < client.ttl(key) <= 2 * 604_800 for key in keys)
    assert 0 < client.pttl("{q}:outcomes:tallied:w:1:a") <= 86_400_000


def test_a_worker_remembers_so_many(store: Store) -> None:
    tallies = Tallies()
    for n in range(6_000):
        tallies.ended(f"task{n}", AT, "+", 1)
        tallies.began(f"task{n}", AT, 1)
    write(store, tallies)
    assert len(tallies.calls(store, "q", "w")) == 0
    assert sum(each.ended for each in found(store, "hour", AT).values()) == 5_000


def test_what_another_version_counts(store: Store, client: redis.Redis) -> None:
    tallies = Tallies()
    tallies.ended("mail", AT, "+", 1)
    write(store, tallies)
    [key] = client.keys("*rates:60:*")
    [field] = client.hkeys(key)
    store.run("HSET", key, field, store.run("HGET", key, field) + b" 7")
    tallies.ended("mail", AT, "+", 1)
    write(store, tallies)
    text = store.run("HGET", key, field)
    assert text.split()[-1] == b"7"
    assert [*slots(store, ["q", "p"], "hour", AT)] == [Slot("q", AT, "mail", Tally.of(text))]
    assert Tally.of(b"3 1").end("-") == 1


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_shares_are_within_the_bounds(share: float) -> None:
    tally = Tally()
    for ms in range(1_000):
        tally.add_time(4, ms)
    seconds = tally.run_seconds(share)
    assert seconds is not None
    assert abs(seconds - share) < 0.06
    tally.add_time(4, 10 * BOUNDS_MS[-1])
    assert tally.run_seconds(1) == 3_000
