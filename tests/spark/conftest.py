"""One Spark session for all tests here: starting it takes longer than most of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_ext import Delayed
from tests.kit.servers import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.kit.spark import Run

ROOT = Path(__file__).parents[2]

#: Java machines of tests live for seconds: the second compiler, and collecting garbage on all
#: cores, would take longer than they save. Without that compiler the code cache is so small that
#: all of Spark's tests fill it, and then Java fails.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"

if not os.environ.get("CI"):
    pytest.importorskip("pyspark")
    pytest.importorskip("pyarrow")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two cores, and four attempts for each task."""
    from celery_ext.spark.commands.java import session

    directory = tmp_path_factory.mktemp("spark")
    # Read when the JVM and its Python workers start.
    os.environ["SPARK_SUBMIT_OPTS"] = SHORT_LIVED
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    made = session(
        **{
            "spark.master": "local[2,4]",
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.log.level": "OFF",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
        }
    )
    yield made
    made.stop()


@pytest.fixture
def url(server: Server) -> str:
    return f"delayed+{server.url}"


@pytest.fixture
def delayed(url: str) -> Iterator[Delayed]:
    with Celery("tests", broker=url, set_as_current=False) as app, closing(Delayed(app)) as found:
        yield found


@pytest.fixture
def run(spark: SparkSession) -> Run:
    """Run a job as if from the command line, in the session of the tests."""
    from celery_ext.spark.__main__ import main

    def invoke(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, arguments, catch_exceptions=False, **options)

    return invoke
