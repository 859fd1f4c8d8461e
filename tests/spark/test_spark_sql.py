"""The backlog as a table of SQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import schedule
from tests.kit.backlog import check_backlog
from tests.kit.spark import JAN, JAN_MS, numbered

pytestmark = pytest.mark.thorough

COUNT, HOUR_MS = 1_000, 3_600_000

VIEW = "CREATE OR REPLACE TEMPORARY VIEW"


@pytest.fixture
def sql_url(spark: SparkSession, url: str) -> Iterator[str]:
    """A broker with a message for each of many hours in two queues; views and tables go."""
    hour = F.make_dt_interval(hours=F.col("id").cast("int"))
    queue = F.when(F.col("id").cast("int") % 2 == 0, "even").otherwise("odd")
    schedule(numbered(spark, COUNT, eta=F.lit(JAN) + hour, queue=queue), broker=url)
    yield url
    for name in ("delayed", "first", "outbox", "moves", "bare"):
        spark.catalog.dropTempView(name)
        spark.sql(f"DROP TABLE IF EXISTS {name}")


def test_views(spark: SparkSession, sql_url: str, client: redis.Redis) -> None:
    broker = f"USING kombu_delayed OPTIONS (broker '{sql_url}'"
    given = f"{broker}, rows_per_task '100'"
    columns = "(id STRING, queue STRING, due TIMESTAMP)"
    spark.sql(f"{VIEW} delayed {columns} {given})")
    where = "WHERE queue = 'odd' AND due < '2100-01-02'"
    found = spark.sql(f"SELECT id, due FROM delayed {where}")
    assert {row.id for row in found.collect()} == {f"{n}" for n in range(1, 24, 2)}

    # Only the columns that a view names are fetched. Spark runs a task for each span that the
    # options select.
    spark.sql(f"{VIEW} first {columns} {given}, queues 'odd', due_to '2100-01-02')")
    assert spark.sql(f"SELECT id FROM first {where}").count() == 12
    [plan] = spark.sql("EXPLAIN SELECT count(*) FROM first").first() or [""]
    assert "BatchScan kombu_delayed[id#" in plan
    assert "payload" not in plan
    tasks, all_tasks = (spark.table(name).rdd.getNumPartitions() for name in ("first", "delayed"))
    assert tasks == 1 < 4 <= all_tasks

    rows = "(id STRING, task STRING, eta TIMESTAMP)"
    spark.sql(f"{VIEW} outbox {rows} {broker}, queue 'new', job_id 'j')")
    for _ in range(2):
        spark.sql("INSERT INTO outbox SELECT id, 'again', due FROM first")
        assert len(check_backlog(client, "new")) == 12
    spark.sql("INSERT INTO outbox (eta, id, task) VALUES (TIMESTAMP '2100-01-01', 'x', 't')")
    assert check_backlog(client, "new")["x"] == JAN_MS

    more = f"{broker}, queue 'new', operation 'reschedule')"
    spark.sql(f"{VIEW} moves (id STRING, eta TIMESTAMP) {more}")
    spark.sql("INSERT INTO moves VALUES ('x', TIMESTAMP '2100-01-01 01:00:00')")
    assert check_backlog(client, "new")["x"] == JAN_MS + HOUR_MS
    with pytest.raises(AnalysisException, match="a backlog is not overwritten"):
        spark.sql("INSERT OVERWRITE outbox VALUES ('x', 't', TIMESTAMP '2100-01-01')")


def test_a_table(spark: SparkSession, sql_url: str, client: redis.Redis) -> None:
    """It has no options other than those of each query; its error says so."""
    columns = "(id STRING, task STRING, eta TIMESTAMP)"
    given = f"broker = '{sql_url}'"
    spark.sql(f"CREATE TABLE bare {columns} USING kombu_delayed OPTIONS (broker '{sql_url}')")
    with pytest.raises(AnalysisException, match=r"CREATE TEMPORARY VIEW … USING .* WITH \(broker_"):
        spark.sql("SELECT * FROM bare").collect()
    row = "SELECT 'x', 't', TIMESTAMP '2100-01-01'"
    with pytest.raises(AnalysisException, match="Spark does not pass on the options of CREATE TAB"):
        spark.sql(f"INSERT INTO bare {row}")
    assert spark.sql(f"SELECT id FROM bare WITH ({given}, queues = 'odd')").count() == COUNT // 2
    spark.sql(f"INSERT INTO bare WITH ({given}, queue = 'new') {row}")
    assert check_backlog(client, "new") == {"x": JAN_MS}
