"""The boot steps of an extended app's workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from celery import bootsteps
from celery.concurrency.prefork import TaskPool as Processes
from celery.signals import task_received, worker_shutting_down
from celery.utils.log import get_logger

from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.transport.channel.channel import Channel
from kombu_delayed.transport.transport import Transport

from ..app import recorder
from ..app.outcome_options import OutcomeOptions
from ..app.signals import task_late
from .requests.settling import report_errors
from .shutdown.cold_shutdown import cancel_greenlets_later
from .shutdown.draining import Draining, await_threads, is_of_message

logger = get_logger(__name__)

STOCK_STRATEGY, STOCK_REQUEST = "celery.worker.strategy:default", "celery.worker.request:Request"
REQUEST, POOLED_REQUEST = (
    "celery_ext.worker.requests.request:Request",
    "celery_ext.worker.requests.pooled_request:PooledRequest",
)

#: How many times an ending process of the pool is checked, and the time between two checks.
EXIT_LOOKS, EXIT_SECONDS = 100, 0.01

#: How long remote control waits before it reconnects.
RETRY_SECONDS = 1.0


class Inspection(bootsteps.Step):
    """Lets `celery inspect` show the backlog."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        import_module("celery_ext.worker.remote.inspect")  # only workers need its imports
        super().__init__(parent, **kwargs)


class WorkerName(str):
    """A consumer's name that was not chosen by a user."""

    __slots__ = ()


class Names(bootsteps.Step):
    """Names the worker's consumers in the broker after the worker."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        conf, option = parent.app.conf, "delayed_consumer_name"
        options = dict(conf.broker_transport_options)
        # An earlier worker in this process may have left its own.
        if isinstance(options.get(option), (WorkerName, type(None))):
            conf.broker_transport_options = {**options, option: WorkerName(parent.hostname)}


class Recording(bootsteps.StartStopStep):
    """Records the outcomes of tasks, from before the pool starts until after it has ended."""

    def start(self, parent: Any) -> None:
        options = OutcomeOptions.of(parent.app)
        transport = parent.app.connection_for_read().get_transport_cls()
        if options is None or not issubclass(transport, Transport):
            return
        found = recorder.Recorder(parent.app, options, parent.hostname)
        # The last action of a worker: consumers and pools may end after their own steps.
        blueprint = parent.blueprint
        blueprint.on_stopped = partial(self._end, found, blueprint.on_stopped)
        recorder.current = found
        found.start()

    def _end(self, found: recorder.Recorder, stopped: Callable[[], None] | None) -> None:
        if stopped is not None:
            stopped()
        recorder.current = None
        found.stop()


class Lateness(bootsteps.StartStopStep):
    """Sends `task_late`."""

    def start(self, parent: Any) -> None:
        self._late_seconds = parent.app.delayed.late_seconds
        task_received.connect(self._on_received, sender=parent, weak=False)

    def stop(self, parent: Any) -> None:
        task_received.disconnect(self._on_received, sender=parent)

    def _on_received(self, request: Any, **_: Any) -> None:
        eta = dict(request.request_dict).get("eta")
        if eta is None or not task_late.receivers:
            return
        resumed_ms = getattr(request.message.headers, "resumed_ms", 0)
        late_seconds = time.time() - max(eta_to_ms(eta), resumed_ms) / 1000
        if late_seconds > self._late_seconds:
            task_late.send(
                sender=request.name, task_id=request.id, eta=eta, late_seconds=late_seconds
            )


class Turns:
    """Releases a worker's semaphore, on which tasks wait for a free process, without recursion.

    Celery releases it for the next task while it still handles one that is revoked. Several hundred
    revoked tasks in a row exceed Python's recursion limit, and that ends the worker.
    """

    def __init__(self, worker: Any) -> None:
        self._give = worker.semaphore.release
        self._free = 0
        self._is_giving = False
        # The pool calls one of them, and the worker the other.
        worker.semaphore.release = worker._quick_release = self.release

    def release(self) -> None:
        """Note that a process is free, and let the next task have it."""
        self._free += 1
        if self._is_giving:
            return
        self._is_giving = True
        try:
            while self._free:
                self._free -= 1
                self._give()
        finally:
            self._is_giving = False


class OwnRequests(bootsteps.Step):
    """Gives tasks the request that checks whether they may start."""

    requires = ("celery_ext.worker.own_tasks:OwnTasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        if getattr(parent.controller, "semaphore", None) is not None:
            Turns(parent.controller)
        if not isinstance(parent.pool, Processes):
            report_errors(parent.pool)
        # Tasks wait inside pools of threads and greenlets: the ones that a signal must not stop.
        own = REQUEST if parent.pool.signal_safe else POOLED_REQUEST
        for task in parent.app.tasks.values():
            is_stock = task.Request in (STOCK_REQUEST, REQUEST, POOLED_REQUEST)
            if is_stock and task.Strategy == STOCK_STRATEGY:  # others may start without the check
                task.Request = own


class Events(bootsteps.StartStopStep):
    """Keeps a worker from blocking until the broker takes its heartbeat.

    Celery would sleep in its event loop for a second at a time, while acks wait and tasks end.
    In a worker without an event loop, the sender would hold a lock that the worker needs to stop.
    """

    requires = ("celery.worker.consumer.events:Events",)

    def start(self, parent: Any) -> None:
        """Try each event only once that is sent immediately."""
        dispatcher = parent.event_dispatcher
        if dispatcher is not None:
            vars(dispatcher)["send"] = partial(_send_once, dispatcher)


def _send_once(dispatcher: Any, *given: Any, **fields: Any) -> Any:
    unsent = dispatcher._outbound_buffer
    known = len(unsent)
    found = type(dispatcher).send(dispatcher, *given, **{**fields, "retry": False})
    while len(unsent) > known:  # an old heartbeat is useless
        unsent.pop()
    return found


class DeadReasons(bootsteps.Step):
    """Gives the dead letters of messages that Celery rejects before they are tasks a reason."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        for name, reason in (
            ("on_unknown_message", "Celery knows no task in this message"),
            ("on_unknown_task", "the worker has no task {}: did its app import the module?"),
            ("on_invalid_task", "Celery refuses the message: {}"),
        ):
            reject = partial(getattr(type(parent), name), parent)
            vars(parent)[name] = partial(_reject, reject, reason)


def _reject(reject: Any, reason: str, body: Any, message: Any, *error: Exception) -> None:
    if isinstance(message.channel, Channel):
        message.channel.qos.because(message.delivery_tag, reason.format(*error))
    reject(body, message, *error)


class RemoteControlLoop(bootsteps.Step):
    """Lets the greenlet that listens to remote control outlive a lost broker.

    Celery starts another one when the worker reconnects, which it does not do for an outage that
    our transport bridges.
    """

    requires = ("celery.worker.consumer.control:Control",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        control = parent.blueprint.steps["celery.worker.consumer.control.Control"]
        if control.is_green:
            control.box.loop = partial(listen, control.box, control.box.loop)


def listen(box: Any, loop: Any, consumer: Any) -> None:
    """Run the loop of a `gPidbox` until the worker stops it."""
    while True:
        try:
            return loop(consumer)
        except consumer.connection_errors + consumer.channel_errors as error:
            stop = box._node_shutdown
            logger.warning("Remote control connects again: %s", error)
        time.sleep(RETRY_SECONDS)
        if stop is not box._node_shutdown or stop is None or stop.is_set():
            return


class Replacing(bootsteps.StartStopStep):
    """Replaces each process of a pool as soon as it has ended, such as after its last task.

    Celery checks when the process closes its files, which may be a moment before it has ended, and
    would check again after up to five seconds. Ready tasks wait meanwhile.
    """

    def start(self, parent: Any) -> None:
        """Check each ending process until another one has replaced it."""
        pool = getattr(parent.pool, "_pool", None)
        if hasattr(pool, "_event_process_exit"):
            vars(pool)["_event_process_exit"] = partial(_look, pool, EXIT_LOOKS)


def _look(pool: Any, looks: int, hub: Any, process: Any) -> None:
    type(pool)._event_process_exit(pool, hub, process)
    if looks and process in pool._pool:
        hub.call_later(EXIT_SECONDS, _look, pool, looks - 1, hub, process)


class GiveBack(bootsteps.StartStopStep):
    """Returns messages that the worker has not started as soon as it is told to stop."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    #: Whether the handler of a cold shutdown's signal runs and has not reached the pool yet.
    _handles_signal = False
    #: Whether that handler could not wait for the pool.
    _must_wait = False

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._parent = parent
        # Connected until the worker ends: disconnecting takes a lock, which a signal may have left
        # locked that has interrupted the handler of another.
        worker_shutting_down.connect(self._on_signal, sender=parent.hostname, weak=True)

    def start(self, parent: Any) -> None:
        # A cold shutdown begins with this call, and sends that signal last.
        vars(parent.controller)["wait_for_soft_shutdown"] = self._wait_for_soft_shutdown
        draining = Draining.install(parent)
        if draining is not None or not parent.pool.signal_safe:
            vars(parent.pool)["on_stop"] = self._await_pool
            self._stop_pool = draining.stop if draining else partial(_stop_threads, parent)
        if parent.hub is None and not hasattr(parent, "call_soon_ack"):
            vars(parent)["call_soon"] = partial(_call_soon, parent)

    def stop(self, parent: Any) -> None:
        vars(parent.controller).pop("wait_for_soft_shutdown", None)
        if self._must_wait and parent.pool.signal_safe:  # Celery kills the processes next
            self._await_pool()

    def shutdown(self, parent: Any) -> None:
        """Wait for threads: in some cold shutdowns Celery closes its connection while they run.

        Their tasks would return to the queue and run elsewhere as well.
        """
        self._handles_signal = False
        if not (parent.pool.signal_safe or parent.pool.is_green):
            parent.pool.stop()
            if parent.hub is not None:
                parent.hub.close()
        elif self._must_wait:
            self._await_pool()

    def _await_pool(self) -> None:
        """Wait for the pool to end, but not in the handler of a cold shutdown's signal.

        The signal interrupts any thread or greenlet. One of the pool's own would wait for itself,
        and so would one with a lock that the pool needs. A process waits until its messages are
        handled, which the signal may have interrupted.
        """
        self._must_wait, self._handles_signal = self._handles_signal, False
        if not self._must_wait:
            self._stop_pool()

    def _wait_for_soft_shutdown(self) -> None:
        with suppress(Exception):  # Celery must continue, and the signal follows with another try
            self._on_signal()
        if self._parent.pool.is_green:
            cancel_greenlets_later(self._parent)
        else:
            type(self._parent.controller).wait_for_soft_shutdown(self._parent.controller)
        self._handles_signal = True

    def _on_signal(self, **_: Any) -> None:
        channel = getattr(self._parent.task_consumer, "channel", None)
        retire = getattr(channel, "retire", None)
        if retire is None:
            return
        if self._parent.pool.is_green:
            self._parent.pool.spawn_n(retire)  # the handler may run in the hub, which must not wait
            return
        try:
            retire()
        except Exception:  # from another signal: Celery cannot cancel a thread's task
            retire()


def _stop_threads(consumer: Any) -> None:
    if consumer.hub is None:
        type(consumer.pool).on_stop(consumer.pool)
    else:
        await_threads(consumer)


def _call_soon(consumer: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
    """Ack a task at once, as newer versions of Celery do.

    Older versions do so in the next round of their loop, which a full pool of greenlets or a warm
    shutdown delays.
    """
    if is_of_message(callback):
        return callback(*args, **kwargs)
    return type(consumer).call_soon(consumer, callback, *args, **kwargs)


#: The steps of a worker with an extended app, beside those of Celery.
STEPS = {DeadReasons, Events, GiveBack, OwnRequests, RemoteControlLoop, Replacing}
