from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry
from celery.utils.serialization import get_pickleable_exception
from kombu.exceptions import OperationalError

from celery_ext.app import recorder
from celery_ext.app.outcome_options import OutcomeOptions
from celery_ext.app.recorder import Recorder, Run
from celery_ext.control.outcomes import Gone, write_now
from celery_ext.tasks.history import TaskHistory, head_of
from celery_ext.worker.requests.request import Request
from kombu_delayed.store.outcomes.records import Known


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder of an app whose broker is away."""

    class Away:
        def __init__(self, app: Celery) -> None:
            pass

        @property
        def store(self) -> Any:
            raise OperationalError("nobody is there")

    monkeypatch.setattr(recorder, "Broker", Away)
    return Recorder(Celery(set_as_current=False), OutcomeOptions(buffer=100), "w1@host")


def received(told: Recorder, number: int) -> Run | None:
    request = SimpleNamespace(id=str(number), name="mail", _request_dict={"retries": 0})
    return told.received(request, "q")


def test_what_redis_does_not_take_is_bounded_and_counted(told: Recorder) -> None:
    runs = [received(told, number) for number in range(150)]
    assert [run is None for run in runs] == [False] * 100 + [True] * 50
    assert told.dropped == 50
    told.step()
    for run in runs[:3]:
        assert run is not None
        told.ended(run, "+", 0.1)
    told.step()
    assert told.dropped == 53
    assert [note.id for note in told._queues["q"].notes] == [str(number) for number in range(100)]


def noted(told: Recorder, run: Run) -> str:
    note = told._noted(run)
    return "" if note is None else "".join(row[2] for row in note.lines.splitlines())


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("hostname", ['"w1@host"', 'w"1@host', "w\\1@hôst"])
def test_quotes_in_the_name_of_a_worker(hostname: str) -> None:
    """As from a list of arguments that no shell has read: `["-n", "\\"w1@%h\\""]`."""
    told = Recorder(Celery(set_as_current=False), OutcomeOptions(), hostname)
    run = received(told, 1)
    assert run is not None
    note = told._noted(run)
    assert note is not None
    (step,) = TaskHistory.of(Known("q", "1", note.lines.encode(), True)).steps
    assert step.worker.rsplit(":", 2)[0] == hostname.replace('"', "")


@pytest.mark.parametrize("is_short", [True, False])
def test_only_tasks_of_a_canvas_have_its_ids(told: Recorder, is_short: bool) -> None:
    ids = {"root_id": "root", "parent_id": "parent", "group": None}
    found = {}
    for id, headers in (("alone", {"root_id": "alone", "parent_id": None}), ("child", ids)):
        request = SimpleNamespace(id=id, name="mail", _request_dict={"retries": 0, **headers})
        run = told.received(request, "q")
        assert run is not None
        if not is_short:
            told._noted(run)
            run.written = 0
        told.started(run, 7, False)
        told.ended(run, "+", 0.1) if is_short else told.ended(run, "-", {})
        note = told._noted(run)
        assert note is not None
        found[id] = TaskHistory.of(Known("q", id, (note.head + note.lines).encode(), True))
    alone, child = found["alone"], found["child"]
    assert (alone.root_id, alone.parent_id, alone.group_id) == (None, None, None)
    assert (child.root_id, child.parent_id, child.group_id) == ("root", "parent", None)
    assert child.as_dict()["parent_id"] == "parent"
    assert "parent_id" not in alone.as_dict()
    assert (alone.task, child.task) == ("mail", "mail")


def test_each_line_is_written_once(told: Recorder) -> None:
    run = received(told, 1)
    assert run is not None
    assert noted(told, run) == "r"
    assert noted(told, run) == ""
    told.started(run, 7, False)
    told.ended(run, "+", 0.1)
    assert noted(told, run) == "s+"
    assert noted(told, run) == ""


def test_what_has_not_begun_has_no_time_of_its_start(told: Recorder) -> None:
    run = received(told, 1)
    assert run is not None
    told.ended(run, "+", 0.1)
    assert noted(told, run) == "r+"


@pytest.mark.parametrize("steps_at", ["start", "end"])
def test_a_clock_that_is_set_back_hides_no_end(
    told: Recorder, steps_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was shown as running for ever."""
    clock = [1_000_000.0]
    monkeypatch.setattr(recorder, "time", SimpleNamespace(time=lambda: clock[0]))
    run = received(told, 1)
    assert run is not None
    clock[0] -= 5 if steps_at == "start" else 0
    told.started(run, 7, False)
    clock[0] -= 5 if steps_at == "end" else 0
    told.ended(run, "+", 0.1)
    note = told._noted(run)
    assert note is not None
    history = lines(*note.lines.splitlines())
    assert history.state == "succeeded"
    assert [step.event for step in history.steps] == ["received", "started", "succeeded"]


@pytest.mark.parametrize("name", ["a\nb", "a\x00b", 'a"b', "a\\b", "ä"])
def test_a_name_with_any_letters_is_one_line(name: str) -> None:
    assert [json.loads(line) for line in head_of(name, None).splitlines()] == [["t", name, None]]


def test_a_clock_that_is_set_back_gives_no_negative_run_time() -> None:
    request: Any = SimpleNamespace(time_start=time.time() + 3600)
    assert Request._run_ms(request) == 0


def test_an_end_that_comes_while_the_start_is_noted_is_counted(
    told: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = received(told, 1)
    assert run is not None
    told.started(run, 7, False)
    note = told._noted

    def note_late(run: Run) -> Any:
        if not run.ended_at:
            told.ended(run, "+", 0.1)
        return note(run)

    monkeypatch.setattr(told, "_noted", note_late)
    told.step()
    assert [tally.end("+") for tally in run.queue.tallies._counts.values()] == [1]


def test_what_ran_over_its_limit_is_noted_before_its_end_and_is_slow(told: Recorder) -> None:
    run = received(told, 1)
    assert run is not None
    told.started(run, 7, False)
    run.received_at -= 4
    run.started_at -= 4
    run.limit_seconds = 2.5
    told.ended(run, "+", 4.0)
    note = told._noted(run)
    assert note is not None
    assert note.is_slow
    history = lines(*note.lines.splitlines())
    assert [step.event for step in history.steps][-2:] == ["overran", "succeeded"]
    assert history.overran is not None
    assert history.overran.limit_ms == 2500


def lines(*rows: str) -> TaskHistory:
    return TaskHistory.of(Known("q", "a", "\n".join(('["t","mail","acme"]', *rows)).encode(), True))


@pytest.mark.parametrize(
    ("rows", "state", "events"),
    [
        ([], "unknown", []),
        (['["r",5,0,"w@h:7:ab"]'], "received", ["received"]),
        (['["r",5,0,"w@h:7:ab"]', '["r",5,0,"w@h:7:ab"]'], "received", ["received"]),
        # A retry was written by another worker, sooner, or with a clock that is behind.
        (['["+",3,1,5]', '["~",9,0,{"next_ms":9}]'], "succeeded", ["retrying", "succeeded"]),
        # Another worker, whose clock is ahead, has given it back.
        (
            [
                *('["r",20,0,"v@h:8:cd"]', '["b",22,0,{}]'),
                *('["r",5,0,"w@h:7:ab"]', '["s",6,0,"w@h:7:ab",3,0]', '["+",9,0,3]'),
            ],
            "succeeded",
            ["received", "started", "received", "returned", "succeeded"],
        ),
        (
            ['["o",6,0,{"limit_ms":5}]', '["+",9,0,8]'],
            "succeeded",
            ["overran", "succeeded"],
        ),
        (['["s",1,0,"w@h:7:ab",3,0]', '["o",6,0,{}]'], "running", ["started", "overran"]),
        (['["-",9,0,{"error":"TimeLimitExceeded"}]'], "failed", ["timed out"]),
        (['["-",9,0,{"error":"WorkerLostError"}]'], "lost", ["lost"]),
        (['["x",9,0,{"why":"terminated"}]'], "cancelled", ["terminated"]),
        # Of a newer version, and damaged.
        (['["r",5,0,"w@h:7:ab"]', '["new",6,0]', "{", '["s","x"]'], "received", ["received"]),
    ],
)
def test_a_history_is_read_of_its_lines(rows: list[str], state: str, events: list[str]) -> None:
    found = lines(*rows)
    assert (found.task, found.tenant, found.state) == ("mail", "acme", state)
    assert [step.event for step in found.steps] == events


@pytest.mark.parametrize("text", ["ü" * 900, "你好" * 450, "\ud83d" * 900, "\u2028\n" * 450])
def test_a_failure_in_any_alphabet_is_short_enough(told: Recorder, text: str) -> None:
    run = received(told, 1)
    assert run is not None
    told.started(run, 7, False)
    told.failed(run, ValueError(text), text * 2, args=text[:200], kwargs=text[:200])
    note = told._noted(run)
    assert note is not None
    assert len(note.lines.encode()) < 6_000
    found = lines(*note.lines.split("\n"))
    assert found.failure is not None
    said = text[:300].encode(errors="replace").decode()  # half a character is "?"
    assert (found.state, found.failure.message) == ("failed", said)


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize("is_retried", [False, True])
def test_an_error_that_cannot_be_pickled_has_its_own_type(told: Recorder, is_retried: bool) -> None:
    run = received(told, 1)
    assert run is not None
    error = get_pickleable_exception(NoPickle("no hope"))
    if is_retried:
        told.retrying(run, Retry("later", error), "")
    else:
        told.failed(run, error, "")
    note = told._noted(run)
    assert note is not None
    said = json.loads(note.lines.strip().split("\n")[-1])[-1]
    assert (said["error"], said["message"]) == ("NoPickle", "no hope")


def test_what_goes_back_is_noted_once(told: Recorder) -> None:
    run = received(told, 1)
    assert run is not None
    told.returned(run)
    assert noted(told, run) == "rb"
    told.returned(run)
    told.ended(run, "x", {"why": "revoked"})
    assert noted(told, run) == ""
    told.step()


def test_the_name_of_a_tenant_is_bounded(told: Recorder) -> None:
    request = SimpleNamespace(id="a", name="mail", _request_dict={"tenant": "t" * 10_000})
    run = told.received(request, "q")
    assert run is not None
    note = told._noted(run)
    assert note is not None
    assert len(note.head) < 300


def test_it_is_recorded_again_when_all_queues_are(
    told: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server may accept the sign of life of a worker but refuse its notes."""
    caplog.set_level("INFO")
    away = {"q": True}

    def send(queue: str, notes: Any, *options: Any) -> list[Any]:
        if away["q"] and notes:
            raise OperationalError("it takes no notes")
        return []

    store = SimpleNamespace(all_of=lambda calls: [*calls])
    monkeypatch.setattr(told, "_broker", SimpleNamespace(store=store))
    monkeypatch.setattr(recorder, "Outcomes", lambda store: SimpleNamespace(note_calls=send))
    monkeypatch.setattr(recorder.Tallies, "calls", lambda *given: [])
    assert received(told, 1) is not None
    told.step()
    told._beat(ends=False)
    told._queues["q"].beat_at = 0.0
    told._beat(ends=True)
    said = [record.message for record in caplog.records]
    assert said == ["Outcomes of tasks are not recorded for now: it takes no notes"]
    away["q"] = False
    told.step()
    assert [record.message for record in caplog.records][1:] == [
        "Outcomes of tasks are recorded again"
    ]


@pytest.mark.parametrize("name", ["mail", "\ud800"])
def test_an_id_that_is_no_text_keeps_no_other_from_being_written(name: str, told: Recorder) -> None:
    for id in ("a\ud800", "ä", 7):  # Celery runs a task whose id is a number
        run = told.received(SimpleNamespace(id=id, name=name, _request_dict={}), "q")
        assert run is not None
        assert run.task.encode() in (b"mail", rb"\ud800")
    told.step()
    assert [note.id.encode().decode() for note in told._queues["q"].notes] == [
        *("a\\ud800", "ä", "7")
    ]


def test_the_log_has_the_number_of_tasks_that_were_cancelled_without_a_record(
    told: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    gone = [Gone(shard, id) for shard in ("mail", "news") for id in "abc"]
    write_now(told._broker, told.options, "cancelled", gone)
    assert [record.message for record in caplog.records] == [
        "6 tasks are cancelled, but that is not recorded: nobody is there"
    ]
