"""The app for tests with tracing. For workers only: it instruments the importing process."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_process_init
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from celery_ext import install
from celery_ext.worker import tracing
from tests.kit.tasks_app import Settings, make_app
from tests.kit.traces import FileExporter

app = make_app(Settings.from_environment())
install(app)


@worker_process_init.connect(weak=False)
def trace(**_: Any) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    tracing.instrument(provider)
    CeleryInstrumentor().instrument(tracer_provider=provider)
