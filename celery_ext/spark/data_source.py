"""The Spark data source `kombu_delayed`."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from kombu_delayed.errors import OptionError

from .options import ReadOptions, WriteOptions
from .sink.stream_write import StreamWriter
from .sink.write import BacklogWriter
from .source.columns import SCHEMA
from .source.reader import BacklogReader


class DefaultSource(DataSource):
    """The backlog of a broker, to read from and to schedule into."""

    @classmethod
    def name(cls) -> str:
        return "kombu_delayed"

    def schema(self) -> str:
        """All columns. A reader selects some with `.schema(…)`."""
        return SCHEMA

    def reader(self, schema: StructType) -> BacklogReader:
        return BacklogReader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BacklogWriter:
        """A writer that schedules, cancels or reschedules the rows. Raises OptionError."""
        if overwrite:
            raise OptionError('a backlog is not overwritten: use mode("append")')
        writer = BacklogWriter(WriteOptions.parse(self.options), schema)
        writer.begin()
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """A writer for the batches of a streaming query. Raises OptionError."""
        if overwrite:
            raise OptionError('a backlog is not overwritten: use outputMode("append")')
        return StreamWriter(self.options, schema)
