"""Apps whose queue has policies, on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from celery import Celery, states
from celery.app.trace import build_tracer

from celery_ext import install
from celery_ext.policies import Policy
from celery_ext.policies.steps import apply
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app

#: Called with the policies of the queue `celery`, or of `queue`; options are those of the
#: transport. `url` is the URL of another broker.
OpenApp = Callable[..., Celery]


@contextmanager
def apps_on(server: Server) -> Iterator[OpenApp]:
    with ExitStack() as stack:

        def open_app(
            *policies: Policy, queue: str = "celery", url: str | None = None, **options: Any
        ) -> Celery:
            given = {"delayed_policies": {queue: [*policies]} if policies else {}, **options}
            results = f"redis://127.0.0.1:{server.port}/1"
            app = make_app(Settings(url or f"delayed+{server.url}", results, given))
            stack.enter_context(app)
            stack.callback(install(app).close)
            return app

        yield open_app


def take(app: Celery, no_ack: bool = False) -> Any:
    """Take one message of the queue, if it may run."""
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=no_ack)
        if message is not None and not no_ack:
            message.ack()
        return message


def run_next(app: Celery, queue: str = "celery") -> Any:
    """Run the task that is due next as a worker does; returns the state that this led to."""
    for info in [*app.delayed.find()]:
        app.delayed.run_now(info.id)
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(queue)
        message.ack()
        args, kwargs, embed = message.decode()
        own = {"args": args, "kwargs": kwargs, "hostname": "w1@test", "is_eager": False}
        where = {**message.delivery_info, "priority": message.properties.get("priority")}
        sent = {**message.headers, "delivery_info": where}
        task = app.tasks[message.headers["task"]]
        apply(app)
        trace = build_tracer(task.name, task, app=app, hostname="w1@test")
        found = trace(message.headers["id"], args, kwargs, {**sent, **embed, **own})
        return found.info.state if found.info else states.SUCCESS


def let_time_pass(app: Celery) -> None:
    """Make waiting messages due; a reschedule would discard their waits."""
    store = app.delayed.store
    for name in store.run("ZRANGE", "{celery}:partitions", 0, -1):
        key = b"{celery}:delayed:" + name
        for member in store.run("ZRANGE", key, 0, -1):
            store.run("ZADD", key, 1, member)
