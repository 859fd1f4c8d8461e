"""Schedules rows, the second half in a task that Spark starts a second time on another host.

`python speculation_job.py master broker-url port rows`. Both attempts at that task wait for each
other, and for a test, by keys of the server: the first one is half way, the copy has read all
rows, the first one has too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import redis
from pyspark import TaskContext
from pyspark.sql import functions as F

from celery_ext.spark import schedule, session
from tests.kit.jvm import SHORT_LIVED

WAIT_SECONDS = 120

CONF = {
    "spark.cores.max": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
    "spark.sql.execution.python.udf.maxRecordsPerBatch": "50",
}


def main(master: str, url: str, port: int, rows: int) -> None:
    @F.udf(useArrow=False)
    def gate(id: str) -> str:
        """The id, and so much that what waits in buffers is few rows."""
        context, number, told = TaskContext.get(), int(id), f"{id} {'x' * 500}"
        if context is None or context.partitionId() == 0:
            return told
        is_copy, first, half, last = context.attemptNumber() > 0, rows // 2, 3 * rows // 4, rows - 1
        with redis.Redis(port=port, socket_timeout=None) as client:
            if is_copy and number == first:
                client.brpop(["test:go"], WAIT_SECONDS)
            if not is_copy and number == half:
                client.lpush("test:half", 1)
                client.brpop(["test:copied"], WAIT_SECONDS)
            if is_copy and number == last:
                client.lpush("test:copied", 1)
                client.brpop(["test:late"], WAIT_SECONDS)
            if not is_copy and number == last:
                client.lpush("test:late", 1)
        return told

    spark = session(**{"spark.master": master, **CONF})
    frame = spark.range(rows, numPartitions=2).select(
        F.substring_index(gate.asNondeterministic()(F.col("id").cast("string")), " ", 1).alias(
            "id"
        ),
        F.lit("work").alias("task"),
        F.array(F.lit("x" * 500)).alias("args"),
        F.lit("2100-01-01").alias("eta"),
    )
    print(json.dumps(asdict(schedule(frame, broker=url, job_id="j", batch_size=50))))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
