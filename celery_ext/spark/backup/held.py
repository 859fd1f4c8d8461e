"""The ids of a broker's messages: delayed, ready, or held by a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kombu_delayed.inspection.lookup import held_ids
from kombu_delayed.store.calls.shards import queue_of

from .. import backlog
from ..connect import connected
from ..options import ReadOptions, as_texts

_COLUMNS = ["queue", "id"]
_PAGE_SIZE = 1_000


class HeldSource(DataSource):
    """The ready and unacked messages of some queues. One task reads each queue."""

    @classmethod
    def name(cls) -> str:
        return "kombu_delayed_held"

    def schema(self) -> str:
        return "queue string, id string"

    def reader(self, schema: StructType) -> HeldReader:
        return HeldReader(ReadOptions.parse(self.options))


class HeldReader(DataSourceReader):
    """Raises Kombu's OperationalError if the broker fails."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        with connected(self.options, waits=True) as delayed:
            shards = delayed.store.shards
            shards.look_again()
            return [InputPartition(s) for queue in self.options.queues for s in shards.all(queue)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        with connected(self.options) as delayed:
            ids = map(_readable, held_ids(delayed.store, partition.value))
            while page := [*islice(ids, _PAGE_SIZE)]:
                queues = [queue_of(partition.value)] * len(page)
                yield pyarrow.RecordBatch.from_arrays(
                    [pyarrow.array(queues), pyarrow.array(page)], names=_COLUMNS
                )


def _readable(id: str) -> str:
    """As in the columns of the backlog."""
    return id.encode(errors="backslashreplace").decode()


def in_broker(messages: DataFrame, broker: Mapping[str, Any]) -> DataFrame:
    """The subset of `messages`, by queue and id, that a broker has: delayed, ready or unacked.

    These states are read in this order, in which messages move, so none is missed. The delayed
    ones have been read when this returns. `broker` are options of `BrokerOptions`.
    """
    spark, ids = messages.sparkSession, messages.select(*_COLUMNS)
    queues = [row.queue for row in ids.select("queue").distinct().collect()]
    if not queues:
        return ids.limit(0)
    options = {**broker, "queues": queues}
    index = backlog(spark, columns=_COLUMNS, **options)
    waiting = index.join(ids, _COLUMNS).persist()
    waiting.count()
    spark.dataSource.register(HeldSource)
    held = spark.read.format(HeldSource.name()).options(**as_texts(options)).load()
    return waiting.union(held.join(ids, _COLUMNS)).distinct()
