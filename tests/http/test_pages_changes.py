"""Cancel, move, run now, replay, drop: the preview and the result of each."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.http.pages import choosing
from kombu_delayed.message.envelope import open_envelope
from kombu_delayed.store.outcomes.records import Kept, Note, Outcomes
from tests.kit.http import bury
from tests.kit.pages import Page, Visitor, sent

HOUR = timedelta(hours=1)


@pytest.fixture
def due(app: Celery) -> datetime:
    """Five mails and a charge, an hour apart, beginning at this time."""
    start = datetime.now(timezone.utc).replace(microsecond=0) + HOUR
    for n in range(5):
        app.send_task("till.send_mail", [n], task_id=f"mail-{n}", eta=start + n * HOUR)
    app.send_task("till.charge", task_id="charge", eta=start + 5 * HOUR)
    return start


def ids(delayed: Delayed) -> list[str]:
    return sorted(info.id for info in delayed.find())


def preview(visitor: Visitor, verb: str, query: str = "", **more: Any) -> Page:
    form = visitor.get(f"/backlog{query}").form("/backlog/preview")
    return visitor.post(form.action, sent(form, verb=verb, **more))


def some(visitor: Visitor, *places: int) -> dict[str, Any]:
    """The data that a form sends when tasks at these places are chosen."""
    names = visitor.get("/backlog").form("/preview").values("chosen")
    return {"all": [], "chosen": [names[place] for place in places]}


EVERYTHING = {"all": "1", "chosen": []}


def confirm(visitor: Visitor, page: Page, status: int = 200, **more: Any) -> Page:
    form = page.form("/change")
    return visitor.post(form.action, {**sent(form), **more}, status)


def test_cancel(visitor: Visitor, due: datetime, delayed: Delayed) -> None:
    page = preview(visitor, "cancel", **some(visitor, 1, 3))
    assert "Cancel 2 tasks?" in page.text
    assert "till.send_mail" in page.text
    assert "till.charge" not in page.text
    assert f"{due + HOUR:%Y-%m-%d %H:%M:%S} UTC" in page.text
    assert len(ids(delayed)) == 6
    assert "2 tasks cancelled." in confirm(visitor, page).text
    page = preview(visitor, "cancel", "?task=till.send*", **EVERYTHING)
    assert "task=till.send*" in page.text
    assert "3 tasks cancelled." in confirm(visitor, page).text
    assert ids(delayed) == ["charge"]


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"how": "later", "by": "90m"}, 1.5 * HOUR),
        ({"how": "earlier", "by": "30m"}, -0.5 * HOUR),
        ({"how": "to", "to": "2100-01-31T09:00"}, None),
    ],
)
def test_move(
    visitor: Visitor,
    due: datetime,
    delayed: Delayed,
    given: dict[str, str],
    moved: timedelta | None,
) -> None:
    page = preview(visitor, "move", **some(visitor, 0, 2))
    assert "choose a time" in page.text
    given = {"by": "", "to": "", **given}
    shown = visitor.post("/backlog/preview", {**sent(page.form("/change")), **given})
    there = datetime(2100, 1, 31, 9, tzinfo=timezone.utc)
    expected = [due + n * HOUR + moved if moved else there for n in (0, 2)]
    assert all(f"{each:%Y-%m-%d %H:%M:%S} UTC" in shown.text for each in expected)
    assert "2 tasks moved." in confirm(visitor, shown, **given).text
    etas = {info.id: info.eta for info in delayed.find()}
    assert [etas["mail-0"], etas["mail-1"], etas["mail-2"]] == [
        *(expected[0], due + HOUR, expected[1])
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"how": "later", "by": "soon"}, "not a length of time"),
        ({"how": "to", "to": "soon"}, "is not a time"),
        ({"how": "later", "by": "", "to": "2100-01-31T09:00"}, "by how long, or to what time"),
        ({"how": "to", "by": "1h"}, "by how long, or to what time"),
    ],
)
def test_move_nowhere(
    visitor: Visitor, due: datetime, delayed: Delayed, given: dict[str, str], says: str
) -> None:
    page = preview(visitor, "move", **some(visitor, 0))
    form = page.form("/change")
    shown = visitor.post("/backlog/preview", {**sent(form), "to": "", **given}, 422)
    assert says in shown.text
    wrong = [each for each in shown.all("input") if each.get("aria-invalid")]
    assert [each["aria-describedby"] for each in wrong] == [
        each["id"] for each in shown.all("p") if each.get("class") == "wrong"
    ]
    confirm(visitor, page, 422, **{"to": "", **given})
    assert delayed.get("mail-0").eta == due  # type: ignore[union-attr]
    confirm(visitor, page, how="later", by="1h")
    assert delayed.get("mail-0").eta == due + HOUR  # type: ignore[union-attr]


def test_a_move_is_what_its_preview_has_shown(
    visitor: Visitor, due: datetime, delayed: Delayed
) -> None:
    page = preview(visitor, "move", **some(visitor, 0))
    given = {"how": "later", "by": "2h", "to": ""}
    page = visitor.post("/backlog/preview", {**sent(page.form("/change")), **given})
    page = confirm(visitor, page, **{**given, "by": "5h"})
    assert f"{due + 5 * HOUR:%Y-%m-%d %H:%M:%S} UTC" in page.text
    assert delayed.get("mail-0").eta == due  # type: ignore[union-attr]
    assert "1 task moved." in confirm(visitor, page).text
    assert delayed.get("mail-0").eta == due + 5 * HOUR  # type: ignore[union-attr]


def test_run_now(visitor: Visitor, due: datetime, delayed: Delayed) -> None:
    page = preview(visitor, "run-now", **some(visitor, 0))
    assert "ready" in page.text
    done = confirm(visitor, page)
    assert "1 task made to run now." in done.text
    assert delayed.get("mail-0").state == "ready"  # type: ignore[union-attr]


def test_a_ready_task(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    for id in ("a", "b", "c"):
        app.send_task("till.charge", [id], task_id=id)

    def change(id: str, verb: str, **more: Any) -> str:
        page = visitor.get(f"/task?id={id}")
        assert "This task waits for a free worker." in page.text
        form = page.form("/backlog/preview")
        page = visitor.post(form.action, sent(form, verb=verb))
        assert "It is ready: it waits for a free worker." in page.text
        return confirm(visitor, page, **more).text

    assert "1 task moved." in change("a", "move", how="later", by="1h", to="")
    assert "1 task cancelled." in change("b", "cancel")
    app.send_task("till.charge", task_id="d")
    assert "1 task made to run now." in change("d", "run-now")
    found = {id: delayed.get(id) for id in "abcd"}
    states = {id: info.state if info else None for id, info in found.items()}
    assert states == {"a": "delayed", "b": None, "c": "ready", "d": "ready"}
    got = delayed.store.deliver("celery", "w:1:x", 1, 1, lease_ms=30_000)
    assert got is not None
    assert open_envelope(got.records[0][1:], 0).id == "d"


@pytest.fixture
def ready(app: Celery) -> None:
    """Nine ready tasks of three tenants."""
    for n in range(9):
        app.send_task("till.charge", [n], task_id=f"r{n}", headers={"tenant": f"tenant{n % 3}"})


def ready_ids(delayed: Delayed, queue: str = "celery") -> list[str]:
    return [info.id for info in delayed.find(state="ready", queue=queue)]


READY = "?state=ready&tenant=tenant1"


def test_the_list_of_ready_tasks(visitor: Visitor, ready: None) -> None:
    page = visitor.get("/backlog?state=ready")
    assert "9 ready" in page.text
    assert len(page.form("/backlog/preview").values("chosen")) == 9
    assert len(visitor.get(f"/backlog{READY}").form("/preview").values("chosen")) == 3
    assert "No ready task matches the search." in visitor.get("/backlog?state=ready&task=x").text
    visitor.get("/backlog?state=ready&due_after=2030-01-01", 422)
    visitor.get("/backlog?state=failed", 422)


def test_change_many_ready_tasks(visitor: Visitor, ready: None, delayed: Delayed) -> None:
    page = preview(visitor, "cancel", READY, **EVERYTHING)
    assert "Cancel 3 tasks?" in page.text
    assert "They are ready: they wait for a free worker." in page.text
    assert len(ready_ids(delayed)) == 9
    done = confirm(visitor, page)
    assert "3 tasks cancelled." in done.text
    assert "No ready task matches the search." in done.text
    names = visitor.get("/backlog?state=ready").form("/preview").values("chosen")
    page = preview(visitor, "move", "?state=ready", all=[], chosen=names[1:3])
    assert "2 tasks moved." in confirm(visitor, page, how="later", by="1h", to="").text
    assert ready_ids(delayed) == ["r8", "r3", "r2", "r0"]
    assert ids(delayed) == ["r5", "r6"]
    page = preview(visitor, "run-now", "?state=ready", **EVERYTHING)
    assert "They are put in front" in page.text
    assert "4 tasks made to run now." in confirm(visitor, page).text


@pytest.mark.parametrize("state", ["scheduled", "ready"])
def test_to_another_queue(
    visitor: Visitor, app: Celery, due: datetime, ready: None, delayed: Delayed, state: str
) -> None:
    app.send_task("till.charge", queue="other")
    page = preview(
        visitor, "redirect", f"?state={state}&queue=celery&task=till.charge", **EVERYTHING
    )
    count = {"scheduled": "1 task", "ready": "9 tasks"}[state]
    assert f"Move {count} to another queue?" in page.text
    wrong = confirm(visitor, page, 422, to_queue="otter")
    assert "there is no queue" in wrong.text
    assert wrong.form("/change").values("to_queue") == ["otter"]
    assert "Move all that match" in wrong.text
    assert f"{count} moved to another queue." in confirm(visitor, page, to_queue="other").text
    counts = delayed.counts("other")["other"]
    assert (counts.delayed, counts.ready) == ((1, 1) if state == "scheduled" else (0, 10))


def test_a_form_is_taken_once(visitor: Visitor, due: datetime, delayed: Delayed) -> None:
    page = preview(visitor, "move", **some(visitor, 0))
    given = {"how": "later", "by": "1h", "to": ""}
    confirm(visitor, page, **given)
    again = confirm(visitor, page, 409, **given)
    assert "Nothing was changed" in again.text
    assert "sent before: look at the list for its result" in again.text
    assert delayed.get("mail-0").eta == due + HOUR  # type: ignore[union-attr]


def test_what_is_gone_meanwhile(visitor: Visitor, due: datetime, delayed: Delayed) -> None:
    page = preview(visitor, "cancel", **some(visitor, 0, 1))
    delayed.cancel("mail-0")
    said = "1 task cancelled. 1 of the selected ones had left the list, and were not changed."
    assert said in confirm(visitor, page).text
    page = preview(visitor, "cancel", **some(visitor))
    assert "Nothing to change" in page.text


def test_a_part_at_a_time(
    visitor: Visitor, due: datetime, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "MOST", 4)
    page = preview(visitor, "cancel", **EVERYTHING)
    assert "More tasks match. The first 4 of them are selected" in page.text
    confirm(visitor, page)
    assert ids(delayed) == ["charge", "mail-4"]


@pytest.mark.parametrize(
    ("forms", "given", "status"),
    [
        *(("change preview", {"verb": verb, "all": "1"}, 422) for verb in ("", "drop", "cancel\n")),
        *(("change", {"chosen": id}, 422) for id in ("x", "WzFd", "WyJhIl0", "WyJjZWxlcnkiLCAxXQ")),
        ("change", {"chosen": ["x"] * 20_000}, 400),
    ],
)
def test_forms_that_are_made_up(
    visitor: Visitor, due: datetime, forms: str, given: dict[str, Any], status: int
) -> None:
    csrf = visitor.csrf()
    for page, verb in (("backlog", "cancel"), ("dead", "purge")):
        for form in forms.split():
            visitor.post(f"/{page}/{form}", {"csrf": csrf, "verb": verb, **given}, status)


@pytest.fixture
def dead(app: Celery, delayed: Delayed) -> list[str]:
    """Three charges that failed alike, and a mail."""
    for n in range(3):
        app.send_task("till.charge", task_id=f"dead-{n}")
        bury(delayed, reason=f"Declined: card {n}")
    app.send_task("till.send_mail", task_id="dead-3")
    bury(delayed, reason="Lost")
    return [f"dead-{n}" for n in range(4)]


def letters(delayed: Delayed) -> list[str]:
    return sorted(each.letter.id for each in delayed.dead.list())


def group(visitor: Visitor) -> Page:
    link = next(each for each in visitor.get("/dead").links() if "Declined" in each)
    return visitor.get(link)


def test_replay_a_group(visitor: Visitor, dead: list[str], delayed: Delayed) -> None:
    form = group(visitor).form("/dead/preview")
    page = visitor.post(form.action, sent(form, verb="replay", **EVERYTHING))
    assert "Replay: 3 dead letters?" in page.text
    assert "Lost" not in page.text
    assert "3 dead letters given another try." in confirm(visitor, page).text
    assert letters(delayed) == ["dead-3"]
    assert delayed.counts("celery")["celery"].ready == 3


@pytest.mark.parametrize("how", ["at", "to_queue"])
def test_replay_otherwise(
    visitor: Visitor, app: Celery, dead: list[str], delayed: Delayed, how: str
) -> None:
    app.send_task("till.charge", queue="other")
    form = group(visitor).form("/dead/preview")
    page = visitor.post(form.action, sent(form, verb="replay", **EVERYTHING))
    for wrong in ({"at": "soon"}, {"to_queue": "otter"}, {"at": "2100-01-31", "to_queue": "other"}):
        confirm(visitor, page, 422, **wrong)
    assert letters(delayed) == dead
    given = {"at": "2100-01-31T09:00"} if how == "at" else {"to_queue": "other"}
    assert "3 dead letters given another try." in confirm(visitor, page, **given).text
    assert letters(delayed) == ["dead-3"]
    if how == "at":
        assert {info.eta for info in delayed.find()} == {
            datetime(2100, 1, 31, 9, tzinfo=timezone.utc)
        }
    else:
        assert ready_ids(delayed, "other")[:3] == dead[2::-1]


@pytest.fixture
def attempts(app: Celery, delayed: Delayed) -> None:
    """Two tasks that wait for a retry and two that failed, one of them a dead letter."""
    for n in range(2):
        app.send_task("till.charge", task_id=f"again-{n}", countdown=3600, retries=1)
        app.send_task("till.charge", task_id=f"bad-{n}")
    bury(delayed)
    delayed.store.dead.purge("celery", ["bad-1"])
    at_ms = int(datetime.now(timezone.utc).timestamp() * 1000)
    facts = f'{{"error":"Declined","message":"no","next_ms":{at_ms + 3_600_000}}}]'
    notes = [
        Note(id, sign, at_ms, False, '["t","till.charge",null]\n', f'["{sign}",{at_ms},0,{facts}\n')
        for sign, name in (("~", "again"), ("-", "bad"))
        for id in (f"{name}-0", f"{name}-1")
    ]
    calls = Outcomes(delayed.store).note_calls("celery", notes, Kept(1_000, 86_400_000))
    delayed.store.all_of(calls)


def test_what_waits_for_another_try(visitor: Visitor, attempts: None, delayed: Delayed) -> None:
    form = visitor.get("/failures?of=retrying&task=till.*").form("/backlog/preview")
    names = form.values("chosen")
    assert len(names) == 2
    page = visitor.post(form.action, sent(form, verb="cancel", all=[], chosen=names[:1]))
    assert "Cancel 1 task?" in page.text
    done = confirm(visitor, page)
    assert "1 task cancelled." in done.text
    assert done.form("/backlog/preview").values("of") == ["retrying"]
    assert len(ids(delayed)) == 1
    page = visitor.post(form.action, sent(form, verb="run-now", **EVERYTHING))
    assert "Run now 1 task?" in page.text
    confirm(visitor, page)
    assert ids(delayed) == []
    running = visitor.get("/failures?of=running").forms
    assert not [form for form in running if form.action.endswith("/preview")]


def test_what_has_failed_for_good(visitor: Visitor, attempts: None, delayed: Delayed) -> None:
    form = visitor.get("/failures").form("/dead/preview")
    (name,) = form.values("chosen")
    page = visitor.post(form.action, sent(form, verb="replay", chosen=[name]))
    assert "Replay: 1 dead letter?" in page.text
    done = confirm(visitor, page)
    assert "1 dead letter given another try." in done.text
    assert "Declined" in done.text
    assert letters(delayed) == []
    assert ready_ids(delayed) == ["bad-0"]


def test_drop_one(visitor: Visitor, dead: list[str], delayed: Delayed) -> None:
    form = group(visitor).form("/dead/preview")
    names = form.values("chosen")
    page = visitor.post(form.action, sent(form, verb="purge", chosen=names[:1], all=[]))
    assert "cannot be undone" in page.text
    assert letters(delayed) == dead
    assert "1 dead letter dropped for good." in confirm(visitor, page).text
    assert letters(delayed) == dead[1:]
    assert delayed.counts("celery")["celery"].ready == 0


def test_results_that_are_made_up(visitor: Visitor) -> None:
    page = visitor.get("/backlog?done=<b>x&count=1&among=1")
    assert not [each for each in page.all("p") if "good" in each.get("class", "")]
    page = visitor.get("/backlog?done=cancel&count=-1")
    assert "cancelled" not in page.text
