"""Lifecycle events as a DataFrame, from short histories in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from celery_ext.spark.events.batches import SCHEMA

START = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)

WITHOUT_A_WORKER = ("scheduled", "rescheduled", "cancelled", "replayed")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def ms(seconds: float) -> int:
    return round(at(seconds).timestamp() * 1000)


def happened(spark: SparkSession, histories: Mapping[str, str], due: float = 0) -> DataFrame:
    """The events of messages by id: "1 delivered, 3 acked" names the second of each event.

    They belong to queue q, task mail and worker w1, and are due in second `due`. Fields after an
    event change that value from there on: "0 scheduled due=9, 9 delivered worker=w2". "parked" is
    scheduled by its worker.
    """
    rows: list[tuple[Any, ...]] = []
    for id, history in histories.items():
        now = {"due": str(due), "worker": "w1", "queue": "q", "task": "mail", "deliveries": "0"}
        for event in history.split(", "):
            second, name, *changes = event.split()
            now |= dict(each.split("=") for each in changes)
            due_at = None if now["due"] == "none" else at(float(now["due"]))
            worker = "" if name in WITHOUT_A_WORKER else f"{now['worker']}@host"
            name = "scheduled" if name == "parked" else name
            rows.append(
                (
                    *(f"{ms(float(second))}-{len(rows)}", name, id, now["task"], "", now["queue"]),
                    *(due_at, at(float(second))),
                    *(worker and f"{worker}:1:aa", worker, int(now["deliveries"]), "", ""),
                )
            )
    return spark.createDataFrame(rows, SCHEMA)
