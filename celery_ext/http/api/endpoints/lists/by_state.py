"""Tasks by state, page by page: ready ones, dead letters, and those that workers recorded."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from celery_ext.control.changes.ready import ReadyTask, ready_task
from celery_ext.control.outcomes import TaskFilter, is_listed
from celery_ext.tasks.history import TaskHistory
from celery_ext.tasks.query import Query
from kombu_delayed.inspection.ready.lists import id_of
from kombu_delayed.store.outcomes.records import TOP, Outcomes, Place

from ....problems import Problem
from ... import cursors
from ...models import DeadQuery, Filter, Search
from ...operations import Call
from ...ready import EMPTY, SEARCH_SECONDS
from ...status import State, state_of, state_of_record
from ..dead_letters import letters_page

#: How many messages, or records, one search looks at before it returns what it has found.
LOOKED_AT, RECORDS = 20_000, 5_000

#: The lists of workers' records that have the tasks of a state.
LISTS = {
    "failed": ("failed", "running"),
    "retrying": ("retrying",),
    "running": ("running",),
    "slow": ("slow",),
}


def tasks_by_state(call: Call, search: Search) -> tuple[list[State], str | None]:
    """A page of tasks in a state other than delayed, and the next cursor; None: no more."""
    if search.state == "ready":
        ready, following = ready_page(call, search, search.limit, search.cursor)
        return [state_of(call.service, each.info) for each in ready], following
    if search.state == "dead":
        return _dead(call, search)
    return _recorded(call, search)


def check(search: Search) -> None:
    """Raises a Problem for a criterion that the tasks of a state do not have."""
    for name in ("due_after", "due_before"):
        if getattr(search, name) is not None and search.state != "scheduled":
            raise Problem.of_field(name, "only delayed tasks are searched by due time")
    if search.state not in LISTS and (given := search.recorded_only):
        raise Problem.of_field(next(iter(given)), "only tasks that workers have recorded have one")
    if search.state in LISTS and search.where is not None:
        raise Problem.of_field("where", "workers record no arguments that could be searched")


def _dead(call: Call, search: Search) -> tuple[list[State], str | None]:
    given = search.model_dump(include={"queue", "task", "limit", "cursor"})
    query = DeadQuery.model_validate(given)
    found, following = letters_page(call, query)
    wanted = Query(tenant=search.tenant, where=search.where)
    mine = (each for _, each in found if wanted.matches(each.info))
    return [state_of(call.service, each.info, each.letter.at_ms) for each in mine], following


def _recorded(call: Call, search: Search) -> tuple[list[State], str | None]:
    outcomes, chosen = Outcomes(call.service.delayed.store), filter_of_search(search)
    found: list[State] = []
    left, state = RECORDS, search.state or ""

    def following(shard: str, of: str, place: Place) -> str | None:
        is_full = left <= 0 or len(found) >= search.limit
        if not is_full:
            return None
        return cursors.write_place(call, shard, place.at_ms, f"{of} {place.id}")

    for shard, of, begin in _lists(call, search):
        if cursor := following(shard, of, begin):
            return found, cursor
        for place, known in outcomes.listed(shard, of, begin):
            if cursor := following(shard, of, place):
                return found, cursor
            left, record = left - 1, TaskHistory.of(known)
            if _is_wanted(call, search, record, state, of) and chosen.matches(record):
                found.append(state_of_record(record))
        left -= EMPTY
    return found, None


def filter_of_search(search: Search) -> TaskFilter:
    """The recorded tasks that a search selects."""
    lengths = (search.longer_than, search.shorter_than)
    return TaskFilter(search.task, search.error, search.worker, *lengths)


def _lists(call: Call, search: Search) -> Iterator[tuple[str, str, Place]]:
    """The lists of each shard, from the cursor on, and the place at which to begin."""
    first, at_ms, name = cursors.read_place(call, search.cursor)
    of, mark, id = name.partition(" ")
    lists, begin = LISTS[search.state or ""], Place(at_ms, id)
    if search.cursor is None:
        of, begin = lists[0], TOP
    elif not (mark and of in lists):
        raise Problem.of_field("cursor", "this search has not returned it")
    for shard in sorted(call.service.shards(call.identity, search.queue)):
        for each in lists:
            if (shard, each) == (first, of):
                yield shard, each, begin
            elif (shard, lists.index(each)) > (first, lists.index(of)):
                yield shard, each, TOP


def _is_wanted(call: Call, search: Search, record: TaskHistory, state: str, of: str) -> bool:
    # A process that died has not recorded the failure.
    is_one = record.state == "lost" if of != state else is_listed(record, of)
    is_of_tenant = search.tenant in (None, record.tenant)
    return is_one and is_of_tenant and call.identity.sees(record.queue, record.tenant)


def ready_page(
    call: Call, given: Filter, limit: int, cursor: str | None, root_id: str | None = None
) -> tuple[list[ReadyTask], str | None]:
    """A page of ready tasks, by queue, the latest first, and the next cursor; None: no more."""
    place = cursors.read_place(call, cursor)
    query = Query(
        task=given.task, queue=given.queue, tenant=given.tenant, where=given.where, root_id=root_id
    )
    needles, left = [query.needle] if query.needle else [], LOOKED_AT
    found: list[ReadyTask] = []
    until = monotonic() + SEARCH_SECONDS
    for shard in sorted(call.service.shards(call.identity, given.queue)):
        if shard < place[0]:
            continue
        lists = call.service.delayed.ready_index.lists(call.service.delayed.store, shard)
        step, start = (place[2], place[1]) if shard == place[0] else ("", 0)
        left -= EMPTY
        steps = [each for each in lists.steps if not step or each >= _number(step)]
        for number in steps:
            start = start if str(number) == step else 0
            more = True
            while more:
                if left <= 0 or len(found) >= limit:
                    return found, cursors.write_place(call, shard, start, str(number))
                looked_at, more, page = lists.page(number, start, needles)
                left -= max(looked_at, 1) * query.weight
                for each in page:
                    if id_of(each.message):
                        task = ready_task(shard, lists, each)
                        if query.matches(task.info) and call.identity.sees(
                            task.info.queue, task.info.tenant
                        ):
                            if len(found) >= limit:
                                return found, cursors.write_place(call, shard, each.at, str(number))
                            found.append(task)
                    if monotonic() >= until:
                        return found, cursors.write_place(call, shard, each.at + 1, str(number))
                start += looked_at
    return found, None


def _number(step: str) -> int:
    if not step.isdecimal() or len(step) > 3:
        raise Problem.of_field("cursor", "this search has not returned it")
    return int(step)
