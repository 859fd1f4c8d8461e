"""OpenTelemetry: adds a span for the wait of a task to the trace of its sender."""

from __future__ import annotations

import time
from typing import Any

from celery.signals import before_task_publish, task_prerun
from opentelemetry import propagate, trace

from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.calls.shards import queue_of

__all__ = ["instrument", "uninstrument"]

#: When a message was sent, in ms since the epoch, by the clock of its sender.
SENT = "delayed_sent_ms"

_UID = __name__

_tracer: trace.Tracer | None = None


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Trace the waits of tasks that this process sends or runs. Calling it twice is safe.

    Call it in producers and in workers, before or after `CeleryInstrumentor().instrument()` of
    `opentelemetry-instrumentation-celery`, which creates the spans of sending and running. The span
    of the wait goes from sending to the start of the run; its event `due` marks the due time.
    """
    global _tracer
    _tracer = trace.get_tracer("kombu_delayed", tracer_provider=tracer_provider)
    before_task_publish.connect(_on_publish, weak=False, dispatch_uid=_UID)
    task_prerun.connect(_on_run, weak=False, dispatch_uid=_UID)


def uninstrument() -> None:
    """Stop tracing."""
    before_task_publish.disconnect(dispatch_uid=_UID)
    task_prerun.disconnect(dispatch_uid=_UID)


def _on_publish(headers: dict[str, Any] | None = None, **_: Any) -> None:
    if headers is None:
        return
    headers[SENT] = time.time_ns() // 1_000_000
    if not any(headers.get(name) for name in _carried()):  # else the instrumentation was first
        propagate.inject(headers)


def _on_run(task: Any, **_: Any) -> None:
    request = task.request
    sent_ms = request.get(SENT)
    if type(sent_ms) is not int or _tracer is None:
        return
    now_ns, route = time.time_ns(), (request.delivery_info or {}).get("routing_key")
    context = propagate.extract({name: v for name in _carried() if (v := request.get(name))})
    span = _tracer.start_span(
        f"wait/{task.name}",
        context,
        start_time=min(sent_ms * 1_000_000, now_ns),
        attributes={
            "messaging.system": "redis",
            "messaging.destination.name": queue_of(str(route or "")),
            "messaging.message.id": str(request.id),
            "celery.task_name": str(task.name),
        },
    )
    due_ms = _due_ms(request.eta)
    if due_ms is not None:
        span.set_attribute("kombu_delayed.late_seconds", now_ns / 1e9 - due_ms / 1000)
        span.add_event("due", timestamp=due_ms * 1_000_000)
    span.end(now_ns)


def _carried() -> set[str]:
    return propagate.get_global_textmap().fields


def _due_ms(eta: Any) -> int | None:
    try:
        return None if eta is None else eta_to_ms(eta)
    except (ValueError, TypeError, OverflowError):
        return None
