"""The backlog as a Spark source: one task reads each span of due times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from celery_ext.tasks.task_info import TaskInfo
from kombu_delayed.inspection import backlog as backlogs

from ..connect import connected
from ..options import ReadOptions
from .columns import COLUMNS, Rows, check_columns
from .paging import Page, Pager, Span, plan

#: A page without messages has this many times more rows.
INDEX_FACTOR = 4


class SpanPartition(InputPartition):
    """A span of the backlog that Spark passes to a task."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)


class BacklogReader(DataSourceReader):
    """Reads the columns of a schema, and fetches no others.

    There is no `pushFilters`: Spark would reuse one query's filters for the next one.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_columns({each.name: each.dataType.simpleString() for each in schema.fields})
        self.options = options
        self.schema = schema
        self._is_wanted = re.compile("|".join(map(translate, options.tasks)))

    @property
    def reads_messages(self) -> bool:
        """Whether messages are read, and not only the index."""
        names = self.schema.fieldNames()
        return bool(self.options.tasks) or any(COLUMNS[name].needs_message for name in names)

    def partitions(self) -> list[InputPartition]:
        """One for about `rows_per_task` messages."""
        options = self.options
        with connected(options, waits=True) as delayed:
            store = delayed.store
            store.shards.look_again()
            given = (shard for queue in options.queues for shard in store.shards.all(queue))
            names = [*dict.fromkeys(given)] or sorted(backlogs.queues(store))
            spans = [Span(name, options.due_from, options.due_to) for name in names]
            parts = [part for s in spans for part in plan(store, s, options.rows_per_task)]
        return [SpanPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The rows of one span. Raises Kombu's OperationalError if the broker fails."""
        if not isinstance(partition, SpanPartition):
            return  # Spark passes None if there are no partitions
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        size = self.options.page_size * (1 if self.reads_messages else INDEX_FACTOR)
        with connected(self.options) as delayed:
            reads = self.reads_messages
            for page in Pager(delayed.store, partition.value, size, reads_messages=reads):
                yield self._batch(self._wanted(page), arrow)

    def _wanted(self, page: Page) -> Page:
        if not self.options.tasks:
            return page
        infos = [TaskInfo("delayed", page.queue, 0, message) for message in page.messages]
        return page.only([bool(self._is_wanted.match(info.task)) for info in infos])

    def _batch(self, page: Page, arrow: pyarrow.Schema) -> pyarrow.RecordBatch:
        rows = Rows(page)
        made = [(COLUMNS[each.name].values(rows), each.type) for each in arrow]
        arrays = [
            values.cast(type_)
            if isinstance(values, pyarrow.Array)
            else pyarrow.array(values, type=type_)
            for values, type_ in made
        ]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=arrow)
