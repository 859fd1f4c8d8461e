from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from celery_ext.control.outcomes import listed as tasks_of
from kombu_delayed.store.outcomes.records import Kept, Known, Note, Outcomes
from kombu_delayed.store.store import Store

AGE_MS = 100_000
KEPT = Kept(320, AGE_MS)
HEAD = '["t","mail",null]\n'
#: The times of the next attempts at two tasks.
AT = {"a": -62_135_596_800_000, "b": 2000}


def note(store: Store, *notes: tuple[str, str], worker: str = "w:1:a", alive_ms: int = 50) -> None:
    """Note a line for each id, at the store's time; the state is the line's letter."""
    made = [
        Note(id, state, int(store.now), False, HEAD, f'["{state}",{store.now},0,"{worker}"]\n')
        for id, state in notes
    ]
    store.all_of(Outcomes(store).note_calls("q", made, KEPT, worker, alive_ms))


def known(store: Store, id: str) -> Known | None:
    return next(iter(Outcomes(store).get(["q"], id)), None)


def listed(store: Store, of: str) -> set[str]:
    return {each.known.id for each in Outcomes(store).listed("q", of)}


@pytest.mark.parametrize(
    ("states", "lists"),
    [
        ("r", ""),
        ("rs", "running"),
        ("rs+", ""),
        ("rs-", "failed"),
        ("rs-r", ""),
        ("rs~", "retrying"),
        ("rs~rs", "running"),
        ("rs~rs+", ""),
        ("rsx", ""),
    ],
)
def test_a_task_is_in_the_list_of_its_last_state(states: str, lists: str, store: Store) -> None:
    for state in states:
        note(store, ("a", state))
    found = {of for of in ("running", "failed", "retrying") if listed(store, of)}
    assert found == {*lists.split()}
    one = known(store, "a")
    assert one is not None
    assert one.text.decode().splitlines() == [
        HEAD.strip(),
        *(f'["{state}",1000,0,"w:1:a"]' for state in states),
    ]


def test_a_retry_may_have_an_eta_before_1970(store: Store) -> None:
    """It runs at once. The notes of other tasks are in the same call."""
    note(store, ("a", "s"), ("b", "s"))
    made = [Note(id, "~", at, False, HEAD, f'["~",1000,0,{at}]\n') for id, at in AT.items()]
    store.all_of(Outcomes(store).note_calls("q", made, KEPT))
    assert all(f'["~",1000,0,{AT[id]}]' in str(known(store, id)) for id in AT)
    assert listed(store, "running") == set()


def test_many_successes_push_out_the_oldest_and_nothing_else(
    store: Store, client: redis.Redis
) -> None:
    note(store, ("runs", "s"), ("failed", "-"), ("mended", "-"), ("first", "+"))
    note(store, ("mended", "+"))
    for start in range(0, 3000, 500):
        note(store, *((str(number), "+") for number in range(start, start + 500)))
    kept = [number for number in range(3000) if known(store, str(number))]
    assert KEPT.limit <= len(kept) <= 2 * KEPT.limit + 500  # each call has a bound of its own
    assert kept[-1] == 2999
    assert known(store, "first") is None
    assert all(known(store, id) for id in ("runs", "failed", "mended"))
    assert all(0 < client.pttl(key) <= 2 * AGE_MS for key in client.keys("*:outcomes:*"))
    assert len(client.keys("*:outcomes:*")) <= 3 * 32 * 2 + 5


def test_old_ones_go_with_their_hash(store: Store) -> None:
    note(store, ("a", "+"))
    for later in (1.1, 1.2, 2.3):  # other ids of its bucket come, and two hashes are past
        store.now = str(int(1000 + later * AGE_MS))
        note(store, *((str(number), "+") for number in range(200)))
    assert known(store, "a") is None


def test_a_worker_is_alive_while_it_says_so(store: Store) -> None:
    note(store, ("a", "s"))
    note(store, ("b", "s"), worker="other:1:b", alive_ms=500)
    for now, alive in (("1049", {"a", "b"}), ("1051", {"b"}), ("1501", set())):
        store.now = now
        found = [each.known for each in Outcomes(store).listed("q", "running")]
        assert {each.id for each in found if each.is_alive} == alive
    note(store, alive_ms=60)
    assert [each.is_alive for each in Outcomes(store).get(["q"], "a")] == [True]
    note(store, alive_ms=0)
    assert [each.is_alive for each in Outcomes(store).get(["q"], "a")] == [False]


def test_a_text_keeps_its_head_and_its_end(store: Store) -> None:
    for number in range(400):
        store.now = str(1000 + number)
        note(store, ("a", "s"))
    one = known(store, "a")
    assert one is not None
    lines = one.text.decode().splitlines()
    assert len(one.text) <= 6000
    assert (lines[0], lines[-1]) == (HEAD.strip(), '["s",1399,0,"w:1:a"]')
    assert all(line.endswith("]") for line in lines)


def test_a_text_keeps_its_last_line_however_long(store: Store) -> None:
    """A head this long is not ours, but it must not stop the other notes of the call."""
    for head, line in ((HEAD, "x" * 7_000), ('["t","mail","' + "t" * 7_000 + '"]\n', "x")):
        made = Note(line[:9], "-", int(store.now), False, head, f'["r"]\n["-","{line}"]\n')
        store.all_of(Outcomes(store).note_calls("q", [made], KEPT, "w:1:a", 50))
        one = known(store, line[:9])
        assert one is not None
        assert one.text.decode() == head + f'["-","{line}"]\n'


def test_a_list_whose_tasks_have_lost_their_texts_has_an_end(
    store: Store, client: redis.Redis
) -> None:
    """Other tasks have pushed out the texts, but their ids remain in the list."""
    ids = [str(n) for n in range(250)]
    slow = [Note(id, "+", 1000, True, HEAD, '["+",1000,0,70000]\n') for id in ids]
    store.all_of(Outcomes(store).note_calls("q", slow, KEPT))
    for key in client.keys("{q}:outcomes:ended:*"):
        if int(key.split(b":")[3]) % 3:
            client.delete(key)
    left = [id for id in ids if known(store, id)]
    queues: Any = SimpleNamespace(store=store)
    assert sorted(each.id for each in tasks_of(queues, "slow", "q")) == sorted(left) != []
    client.delete(*client.keys("{q}:outcomes:ended:*"))
    assert [*tasks_of(queues, "slow", "q")] == []


def test_a_list_is_whole_while_its_tasks_are_sent_again(store: Store) -> None:
    """Each leaves the list when a worker receives it again."""
    failed = f'["-",{store.now},0,{{"error":"ValueError"}}]\n'
    ids = [str(number) for number in range(150)]
    made = [Note(id, "-", int(store.now), False, HEAD, failed) for id in ids]
    store.all_of(Outcomes(store).note_calls("q", made, KEPT))
    queues: Any = SimpleNamespace(store=store)
    found = []
    for task in tasks_of(queues, "failed", "q"):
        found.append(task.id)
        note(store, (task.id, "r"))
    assert sorted(found) == sorted(ids)


@pytest.mark.parametrize("state", ["s", "-"])
def test_a_list_forgets_ids_as_old_as_their_texts(
    state: str, store: Store, client: redis.Redis
) -> None:
    index = "{q}:outcomes:" + {"s": "running", "-": "failed-ids"}[state]
    note(store, ("old", state))
    store.now = str(999 + 2 * AGE_MS)
    note(store, ("new", state))
    assert client.zrange(index, 0, -1) == [b"old", b"new"]
    store.now = str(1000 + 2 * AGE_MS)
    note(store, ("newer", state))
    assert client.zrange(index, 0, -1) == [b"new", b"newer"]


def test_tenants_with_the_same_id_do_not_see_each_other(store: Store) -> None:
    def note_of(tenant: str, state: str, task: str = "mail") -> None:
        head = json.dumps(["t", task, tenant or None]) + "\n"
        line = f'["{state}",{store.now},0,"{tenant}"]\n'
        notes = [Note("a", state, int(store.now), False, head, line)]
        store.all_of(Outcomes(store).note_calls("q", notes, KEPT))

    def text() -> list[str]:
        found = known(store, "a")
        assert found is not None
        return [line[:9] for line in found.text.decode().splitlines()]

    for state in "rs-":
        note_of("ada", state)
    note_of("ada", "r", "another task in its place")
    assert len(text()) == 5
    note_of("", "x", "")
    assert len(text()) == 6
    note_of("bob", "r")
    found = known(store, "a")
    assert found is not None
    assert "ada" not in found.text.decode()
    assert len(text()) == 2
    note_of("", "+")
    assert len(text()) == 2
    assert not listed(store, "failed")
