"""One trace from sending a task through its wait to its run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import signals
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_ext.http import Api
from celery_ext.worker import tracing
from tests.kit.extended import Bench
from tests.kit.http import serving
from tests.kit.traces import FILE
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

MODULE = "tests.kit.traced_app"

Span = dict[str, Any]


@contextmanager
def traced(order: str) -> Iterator[tuple[trace.Tracer, InMemorySpanExporter]]:
    """Trace what this process sends, set up in an order; its spans are in the second one."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    celerys = CeleryInstrumentor()
    if order == "ours last":
        celerys.instrument(tracer_provider=provider)
    tracing.instrument(provider)
    if order == "ours first":
        celerys.instrument(tracer_provider=provider)
    try:
        yield provider.get_tracer("test"), exporter
    finally:
        tracing.uninstrument()
        if celerys.is_instrumented_by_opentelemetry:
            celerys.uninstrument()
    assert not signals.before_task_publish.receivers


@pytest.mark.parametrize(
    ("order", "parent"),
    [
        ("ours first", "apply_async/record"),
        ("ours last", "apply_async/record"),
        ("ours alone", "order"),
    ],
)
def test_what_is_sent(bench: Bench, order: str, parent: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    with traced(order) as (tracer, spans):
        with tracer.start_as_current_span("order"):
            bench.send("a")
        found = {span.name: span.context for span in spans.get_finished_spans()}
    info = bench.app.delayed.get("a")
    span = found[parent]
    expected = f"00-{span.trace_id:032x}-{span.span_id:016x}-"
    assert info.headers["traceparent"].startswith(expected)
    assert before_ms <= info.headers[tracing.SENT] <= time.time_ns() // 1_000_000


def spans_of(path: Path) -> dict[str, Span]:
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {span["name"]: span for span in map(json.loads, lines)}


def wait_for_span(path: Path, name: str) -> dict[str, Span]:
    return wait_until(
        lambda: found if name in (found := spans_of(path)) else {}, f"the span {name}", 30
    )


def test_one_trace(bench: Bench, tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    with traced("ours first") as (tracer, exporter):
        with tracer.start_as_current_span("order") as order:
            bench.send("a", countdown=0.2)
        here = {span.name: span for span in exporter.get_finished_spans()}
    with bench.worker(pool="prefork", module=MODULE, env={FILE: str(spans)}, gossip=False):
        found = wait_for_span(spans, "run/record")
    wait, run, parent = found["wait/record"], found["run/record"], here["apply_async/record"]
    for span in (wait, run):
        assert span["context"]["trace_id"] == f"0x{order.get_span_context().trace_id:032x}"
        assert span["parent_id"] == f"0x{parent.context.span_id:016x}"
    assert wait["start_time"] < wait["end_time"] <= run["start_time"]
    (due,) = wait["events"]
    assert (due["name"], wait["start_time"] < due["timestamp"] < wait["end_time"]) == ("due", True)
    attributes = wait["attributes"]
    assert attributes["messaging.message.id"] == "a"
    assert attributes["messaging.destination.name"] == "celery"
    assert attributes["kombu_delayed.late_seconds"] > 0


def test_a_retry_is_in_the_trace_as_well(bench: Bench, tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    bench.send("a", countdown=0, name="retry", args=(0.1,))
    with bench.worker(pool="prefork", module=MODULE, env={FILE: str(spans)}, gossip=False):

        def runs() -> list[Span]:
            lines = spans.read_text().splitlines() if spans.exists() else []
            found = [json.loads(line) for line in lines]
            return [span for span in found if span["name"] == "run/retry"]

        wait_until(lambda: len(runs()) == 2, "it has run twice", 30)
        found = wait_for_span(spans, "wait/retry")  # nothing records when the first was sent
    first, second = runs()
    assert first["context"]["trace_id"] == second["context"]["trace_id"]
    assert found["wait/retry"]["context"]["trace_id"] == first["context"]["trace_id"]


def test_a_request_is_in_its_tasks_trace(bench: Bench) -> None:
    trace_id = f"00-{'a' * 32}-{'b' * 16}-01"
    with serving(Api(bench.app, needs_token=False)) as url:

        def headers_of(id: str, **headers: str) -> dict[str, Any]:
            task = {"task": "record", "delay": "1h", "id": id}
            assert httpx.post(f"{url}/v1/tasks", json=task, headers=headers).status_code == 201
            line = json.dumps({**task, "id": f"{id}-line"})
            kind = {"content-type": "application/x-ndjson"}
            httpx.post(f"{url}/v1/bulk", content=line, headers={**headers, **kind})
            found = [bench.app.delayed.get(each) for each in (id, f"{id}-line")]
            one, other = (info.headers for info in found if info is not None)
            kept = ("traceparent", "tracestate")
            assert [one.get(name) for name in kept] == [other.get(name) for name in kept]
            return one

        found = headers_of("a", traceparent=trace_id, tracestate="x=1")
        assert (found["traceparent"], found["tracestate"]) == (trace_id, "x=1")
        assert "traceparent" not in headers_of("b", traceparent="00-zz-1", tracestate="x=1")
        assert "tracestate" not in headers_of("c", traceparent=trace_id, tracestate="x" * 600)
