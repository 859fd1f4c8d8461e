"""Writes a streaming DataFrame to a broker: each batch of the query is one write, done once.

A restarted query repeats the batch whose end is not in its checkpoint, and that batch has the same
rows as before. So query and batch identify its ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from kombu_delayed.errors import OptionError
from kombu_delayed.store.ledgers import Job

from ..options import WriteOptions
from .write import BacklogWriter, Written

#: Spark's local properties with the query's id, which the checkpoint keeps, and the batch.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"

#: Spark's own options, which it passes to data sources.
_SPARKS = frozenset({"checkpointlocation", "queryname"})


@dataclass
class BatchWritten(Written):
    """The result of one task of a batch."""

    query: str = ""


class StreamWriter(DataSourceStreamArrowWriter):
    """A streaming query's writes. Spark makes one for each batch, and another to commit it."""

    def __init__(self, given: Mapping[str, Any], schema: StructType) -> None:
        own = {name: value for name, value in given.items() if name.lower() not in _SPARKS}
        self.options = WriteOptions.parse(own)
        self._has_name = any(name.lower() == "job_id" for name in own)
        self._schema = schema
        self._writer("", 0)  # invalid options fail here

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> BatchWritten:
        """Process the rows of a task. Raises like BacklogWriter, and OptionError."""
        query, batch = self._of_task()
        written = self._writer(query, batch).write(iterator)
        return BatchWritten(**vars(written), query=query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, when all tasks of a batch are done; maybe twice for the same batch."""
        for query in self._queries(messages):
            self._writer(query, batchId).commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, when a batch has failed: processed rows stay, and are not repeated."""
        for query in self._queries(messages):
            self._writer(query, batchId).abort(messages)

    def _of_task(self) -> tuple[str, int]:
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context else None
        batch = context.getLocalProperty(_BATCH) if context else None
        if not query or not batch:
            raise OptionError(
                "Spark does not provide the query and the number of this batch; write with "
                "foreachBatch and schedule, and give a job_id with the number of the batch in it"
            )
        return query, int(batch)

    def _writer(self, query: str, batch: int) -> BacklogWriter:
        options = self.options
        name = options.job_id if self._has_name else f"{query}/{batch}"
        run = f"{query}-{batch:08d}"
        job = Job(name, run, options.ledger_seconds, options.operation)
        return BacklogWriter(replace(options, job_id=name), self._schema, job)

    def _queries(self, messages: list[WriterCommitMessage | None]) -> set[str]:
        return {each.query for each in messages if isinstance(each, BatchWritten)}
