"""A million rows through Spark and back, and what ten million would take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from redis import Redis

from tests.benchmarks.report import NOTHING, Benchmark, Figures, Row
from tests.benchmarks.rig import Rig
from tests.benchmarks.spark import (
    NO_MESSAGES,
    PAYLOADS,
    check_parser,
    read_rate,
    reminders,
    spark_session,
    write_rate,
)

PARTS = 4
TEN_MILLION = 10_000_000
GIGABYTE = 2**30


def used_bytes(url: str) -> int:
    with Redis.from_url(url.removeprefix("delayed+")) as client:
        return int(client.info("memory")["used_memory"])  # type: ignore[index]


def fingerprint(frame: Any, due: str) -> tuple[Any, ...]:
    """How many rows, and a sum over the hashes of their ids and due times."""
    from pyspark.sql import functions as F

    hashed = F.xxhash64("id", F.unix_millis(due)).cast("decimal(38,0)")
    return tuple(frame.agg(F.count("*"), F.sum(hashed)).first())


def round_trip(url: str, count: int) -> Figures:
    """Rows are written in parts one after the other, and read together."""
    from celery_ext.spark import backlog

    warm_up = count // 10
    with spark_session() as spark:
        write_rate(spark, url, count, count + warm_up)
        before = used_bytes(url)
        edges = [count * part // PARTS for part in range(PARTS + 1)]
        rates = [write_rate(spark, url, *pair) for pair in pairwise(edges)]
        figures = {
            "write": PARTS / sum(1 / rate for rate in rates),
            "write_first": rates[0],
            "write_last": rates[-1],
            "bytes": (used_bytes(url) - before) / count,
            "read": read_rate(spark, url, PAYLOADS, count + warm_up),
            "index": read_rate(spark, url, NO_MESSAGES, count + warm_up),
        }
        written = fingerprint(reminders(spark, 0, count + warm_up), "eta")
        found = fingerprint(backlog(spark, columns=["id", "due"], broker=url), "due")
        if written != found:
            raise RuntimeError(f"written {written}, read {found}")
    return figures


def measure(rig: Rig) -> Figures:
    check_parser()
    count = rig.scaled(1_000_000, 20_000)
    return {"count": float(count), **rig.apart(round_trip, rig.url(), count, seconds=900)}


def rows(ours: Figures) -> list[Row]:
    count = ours["count"]
    seconds = count / ours["write"] + count / ours["read"]
    ten = TEN_MILLION / ours["write_last"], TEN_MILLION / ours["read"]
    slower = ours["write_last"] / ours["write_first"]
    return [
        _row(
            f"Spark's `schedule` of {count:,.0f} rows with a ledger and `backlog` of them with "
            "payloads on `local[2]`: both, each",
            f"{seconds:,.0f} s, {ours['write']:,.0f}/s, {ours['read']:,.0f}/s",
        ),
        _row("`backlog` of them without any message", f"{ours['index']:,.0f}/s"),
        _row(
            f"its last {1 / PARTS:.0%} beside its first when writing",
            f"{ours['write_last']:,.0f}/s, {ours['write_first']:,.0f}/s",
            f"{slower:.2f}",
        ),
        _row(
            "the server's memory for each row, its ledger and events included",
            f"{ours['bytes']:,.0f} B",
        ),
        _row(
            f"*extrapolated* to {TEN_MILLION:,.0f} rows: writing at the rate of the last "
            f"{1 / PARTS:.0%}, reading at the rate above, memory in proportion",
            f"{ten[0]:,.0f} s, {ten[1]:,.0f} s, {TEN_MILLION * ours['bytes'] / GIGABYTE:.1f} GiB",
        ),
    ]


def _row(what: str, found: str, ratio: str = NOTHING) -> Row:
    return Row(what, NOTHING, NOTHING, found, ratio)


BENCHMARKS = [Benchmark("spark-million", measure, rows, sides=("ours",), rounds=1)]
