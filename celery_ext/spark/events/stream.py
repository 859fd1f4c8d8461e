"""The Spark source `kombu_delayed_events`: lifecycle events of queues as they happen.

    spark.readStream.format("kombu_delayed_events").option("broker", url).load()

The offset of a query has a position for each queue. A batch has the events between two positions of
a stream whose entries never change, so each read gives the same events.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import queues_with
from kombu_delayed.store.calls.shards import CELERY_OWN
from kombu_delayed.store.store import Store

from ..connect import connected
from ..options import NAMES, BrokerOptions, one_of, option, whole_number
from .batches import SCHEMA, batches
from .positions import (
    GONE,
    UNKNOWN,
    EventsLost,
    Loss,
    Piece,
    Position,
    Stream,
    after_loss,
    look,
    loss,
    pieces,
    renewed,
    shares,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: Not Kombu's logger, which is silent unless logging is set up, as in Spark's processes.
logger = logging.getLogger(__name__)

NAME = "kombu_delayed_events"

#: How often a reader without the option `queues` looks for new ones.
DISCOVERY_SECONDS = 60

#: More than any limit on rows.
_ALL = 2**62

Offset = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class EventOptions(BrokerOptions):
    """Options for reading lifecycle events: which ones, and how many at a time."""

    queues: tuple[str, ...] = option(
        (),
        NAMES,
        "The queues to read. Default: all with events, except those of Celery's remote control, "
        "found by scanning all keys of the broker once a minute.",
    )
    starting_offsets: str = option(
        "earliest",
        one_of("earliest", "latest"),
        "Where a query without a checkpoint starts: at the oldest event, or after the newest.",
    )
    max_rows_per_trigger: int = option(
        100_000,
        whole_number(1, 1_000_000_000, "a whole number, 1 or more"),
        "Maximum number of entries in a batch, over all queues.",
    )
    rows_per_task: int = option(
        50_000,
        whole_number(1, 10_000_000),
        "How many entries one task of Spark reads.",
    )
    fail_on_data_loss: str = option(
        "true",
        one_of("true", "True", "false", "False")._replace(allowed="true or false"),
        "Whether to stop if events were trimmed before they were read. Otherwise only warn.",
    )

    @property
    def fails(self) -> bool:
        return self.fail_on_data_loss.lower() == "true"


class EventSource(DataSource):
    """Lifecycle events, for `spark.readStream`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> EventReader:
        """A reader of some of the columns. Raises OptionError for options and columns."""
        return EventReader(EventOptions.parse(self.options), schema)


@dataclass
class Range(InputPartition):
    """A piece of the events of a queue, for one task."""

    queue: str
    piece: Piece


class EventReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches and reads them. Raises EventsLost, and Kombu's OperationalError.

    An instance plans all batches of a query; copies of it read, in other processes. At the start
    and between batches the broker has half a minute to come back, so that a restart does not end
    the query.
    """

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        self.options = options
        self.schema = _arrow_schema(schema)
        self._target: dict[str, Position] | None = None
        self._pieces: dict[tuple[str, str, str], list[Piece]] = {}
        self._queues: set[str] = set()
        self._looked_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pieces": {}}

    # The interface of Spark.

    def initialOffset(self) -> dict[str, Any]:
        with connected(self.options, waits=True) as delayed:
            found = self._streams(delayed.store)
        at_end = self.options.starting_offsets == "latest"
        return offset({q: stream.end if at_end else Position() for q, stream in found.items()})

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_rows_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        with connected(self.options, waits=True) as delayed:
            found = self._streams(delayed.store)
        self._target = {queue: stream.end for queue, stream in found.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else _ALL
        begin = positions(start)
        with connected(self.options, waits=True) as delayed:
            return offset({**begin, **self._plan(delayed.store, begin, rows)})

    def reportLatestOffset(self) -> dict[str, Any] | None:
        with connected(self.options, waits=True) as delayed:
            found = self._streams(delayed.store)
        return offset({queue: stream.end for queue, stream in found.items()}) or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Range]:
        begin, ranges = positions(start), []
        for queue, stop in positions(end).items():
            first = begin.get(queue, Position(n=0))
            if first.id != stop.id:
                found = self.between(queue, first, stop)
                ranges += [Range(queue, piece) for piece in found]
        return ranges

    def read(self, partition: Range) -> Iterator[pa.RecordBatch]:
        """The events of a range. Raises EventsLost if they differ from the planned ones."""
        queue, piece, count = partition.queue, partition.piece, 0
        with connected(self.options) as delayed:
            for entries, batch in batches(delayed.store, queue, piece, self.schema):
                count += entries
                yield batch
            if UNKNOWN != piece.count != count:
                stream, missing = look(delayed.store, queue) or GONE, piece.count - count
                self._lost(Loss(queue, Position(piece.after), stream, missing, anew=missing < 0))

    # Planning.

    def _streams(self, store: Store, known: Iterable[str] = ()) -> dict[str, Stream]:
        """The streams of the queues to read, including those that are `known` already."""
        store.shards.look_again()
        given = {shard for queue in self.options.queues for shard in store.shards.all(queue)}
        names = given or {*known, *self._discover(store)}
        found = {queue: look(store, queue) for queue in names}
        return {queue: stream for queue, stream in found.items() if stream}

    def _discover(self, store: Store) -> set[str]:
        if not self._looked_at or monotonic() - self._looked_at > DISCOVERY_SECONDS:
            self._queues = queues_with_events(store)
            self._looked_at = monotonic()
        return self._queues

    def _plan(self, store: Store, begin: dict[str, Position], rows: int) -> dict[str, Position]:
        streams = self._streams(store, begin)
        starts: dict[str, Position] = {}
        ends: dict[str, Position] = {}
        for queue, stream in streams.items():
            end = stream.end if self._target is None else self._target.get(queue, Position())
            start = self._checked(queue, begin.get(queue, Position(n=0)), stream)
            if start.key < end.key:
                starts[queue], ends[queue] = start, end
        pending = {queue: _pending(starts[queue], ends[queue], streams[queue]) for queue in starts}
        given = shares(pending, rows)
        self._pieces = {}
        return {
            queue: self._end(store, queue, start, ends[queue], pending[queue], given[queue])
            for queue, start in starts.items()
        }

    def _end(
        self, store: Store, queue: str, start: Position, end: Position, pending: int, limit: int
    ) -> Position:
        """The end of the next batch in one queue. Stores its pieces for `partitions`."""
        size = self.options.rows_per_task
        if UNKNOWN not in (start.n, end.n) and pending <= min(limit, size):
            found, stop = [Piece(start.id, end.id, pending)] if pending else [], end
        else:
            found, stop, lost = pieces(store, queue, start, end, limit, size)
            if lost:
                self._lost(Loss(queue, start, look(store, queue) or GONE, lost))
            if stop.id == end.id:
                stop = end
        self._pieces[queue, start.id, stop.id] = found
        return stop

    def between(self, queue: str, start: Position, stop: Position) -> list[Piece]:
        """The pieces of a batch, even if it was planned before this process started."""
        planned = self._pieces.get((queue, start.id, stop.id))
        if planned is not None:
            return planned
        with connected(self.options, waits=True) as delayed:
            store = delayed.store
            stream = look(store, queue) or GONE
            start = self._checked(queue, start, stream)
            found, _, lost = pieces(store, queue, start, stop, _ALL, self.options.rows_per_task)
            if lost:
                self._lost(Loss(queue, start, stream, lost))
            return found

    def _checked(self, queue: str, position: Position, stream: Stream) -> Position:
        position = renewed(position, stream)
        missing = loss(queue, position, stream)
        if missing is None:
            return position
        self._lost(missing)
        return after_loss(missing)

    def _lost(self, missing: Loss) -> None:
        if self.options.fails:
            raise EventsLost(
                f"{missing}. To continue after the gap, set fail_on_data_loss=false (--skip-lost "
                "on the command line)"
            )
        logger.warning("%s", missing)


def _pending(start: Position, end: Position, stream: Stream) -> int:
    """The number of events to read, or an upper bound."""
    if UNKNOWN in (start.n, end.n):
        return stream.length
    return max(end.n - start.n, 0)


def offset(found: Mapping[str, Position]) -> Offset:
    return {queue: {"id": at.id, "n": at.n} for queue, at in sorted(found.items())}


def positions(kept: Mapping[str, Any]) -> dict[str, Position]:
    return {queue: Position(at["id"], at["n"]) for queue, at in kept.items()}


def queues_with_events(store: Store) -> set[str]:
    """The queues with lifecycle events, without those of Celery's own messages."""
    return {name for name in queues_with(store, "events") if not CELERY_OWN.search(name)}


def _arrow_schema(schema: StructType) -> pa.Schema:
    known = {each.name: each for each in SCHEMA}
    for each in schema:
        if each.name not in known:
            raise OptionError(f"{NAME} has no column {each.name!r}; there are {', '.join(known)}")
        if each.dataType != known[each.name].dataType:
            right = known[each.name].dataType.simpleString()
            raise OptionError(
                f"column {each.name} of {NAME} is {right}, not {each.dataType.simpleString()}"
            )
    return to_arrow_schema(schema, timezone="UTC")
