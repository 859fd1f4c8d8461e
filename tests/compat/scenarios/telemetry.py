"""OpenTelemetry's instrumentation of Celery: spans of sender and worker."""

from __future__ import annotations

import json
import os
from pathlib import Path

from celery.signals import worker_init
from common import check, main, new_app, wait_until, worker
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

KEPT = Path(os.environ.setdefault("COMPAT_KEPT", os.path.abspath("spans.jsonl")))


class Keep(SpanExporter):
    """Writes the data that would be sent to a file."""

    def export(self, spans: list[ReadableSpan]) -> SpanExportResult:
        with open(KEPT, "a", encoding="utf-8") as file:
            for each in spans:
                trace_id = each.context.trace_id if each.context else 0
                attributes = {k: str(v) for k, v in (each.attributes or {}).items()}
                print(json.dumps([each.name, trace_id, attributes]), file=file)
        return SpanExportResult.SUCCESS


def _begin(**_: object) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Keep()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


worker_init.connect(_begin, weak=False)
app = new_app("telemetry")


@app.task
def add(x: int, y: int) -> int:
    return x + y


def kept() -> dict[str, list]:
    if not KEPT.exists():
        return {}
    lines = [json.loads(each) for each in KEPT.read_text(encoding="utf-8").splitlines()]
    return {name.partition("/")[0]: [id, attributes] for name, id, attributes in lines}


def traced(countdown: float) -> None:
    KEPT.unlink(missing_ok=True)
    with worker("telemetry"):
        assert add.apply_async((1, 2), countdown=countdown).get(timeout=30) == 3
        spans = wait_until(lambda: len(kept()) == 2 and kept(), "both spans have come")
        assert spans["apply_async"][0] == spans["run"][0], "they are in two traces"
        assert spans["run"][1]["messaging.destination"] == "celery", spans["run"][1]


check("one trace from sender to worker")(lambda: traced(0))
check("the same for a delayed task")(lambda: traced(2))

if __name__ == "__main__":
    _begin()
    main()
