"""Sentry: errors and traces of a worker, sent to a transport that keeps them in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import sentry_sdk
from common import check, main, new_app, wait_until, worker
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

KEPT = Path(os.environ.setdefault("COMPAT_KEPT", os.path.abspath("sentry.jsonl")))


class Keep(Transport):
    """Writes the data that would be sent to a file."""

    def capture_envelope(self, envelope):
        with open(KEPT, "a", encoding="utf-8") as file:
            for item in envelope.items:
                if item.payload.json is not None:
                    print(json.dumps([item.type, item.payload.json], default=str), file=file)


sentry_sdk.init(
    dsn="http://key@127.0.0.1:1/1",
    transport=Keep,
    traces_sample_rate=1.0,
    integrations=[CeleryIntegration()],
)
app = new_app("sentry")


@app.task
def fails(text: str) -> None:
    raise ValueError(text)


def kept(kind: str) -> list[dict]:
    if not KEPT.exists():
        return []
    lines = [json.loads(each) for each in KEPT.read_text(encoding="utf-8").splitlines()]
    return [found for type, found in lines if type == kind]


def told(countdown: float) -> None:
    KEPT.unlink(missing_ok=True)
    with worker("sentry"):
        with sentry_sdk.start_transaction(name="sender") as sending:
            fails.apply_async((f"after {countdown}",), countdown=countdown)
        errors = wait_until(lambda: kept("event"), "Sentry has got the error")
        assert errors[0]["exception"]["values"][-1]["value"] == f"after {countdown}"
        assert errors[0]["transaction"] == "sentry.fails"
        made = wait_until(
            lambda: [e for e in kept("transaction") if e["transaction"] == "sentry.fails"],
            "the task's transaction has come",
        )
        assert made[0]["contexts"]["trace"]["trace_id"] == sending.trace_id, "another trace"


check("a task's error is reported, in the trace of its sender")(lambda: told(0))
check("the same for a delayed task")(lambda: told(2))

if __name__ == "__main__":
    main()
