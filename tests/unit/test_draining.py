"""Cases that a warm shutdown meets in a pool of processes."""

from __future__ import annotations

from types import SimpleNamespace

from billiard.connection import Pipe

from celery_ext.worker.shutdown.draining import Draining


def test_a_process_that_is_gone_is_not_listened_to() -> None:
    """Celery keeps the descriptor of its closed pipe: the shutdown would be interrupted."""
    reader, writer = Pipe(duplex=False)
    fd = reader.fileno()
    reader.close()
    writer.close()
    process = SimpleNamespace(outq=SimpleNamespace(_reader=reader))
    pool = SimpleNamespace(_fileno_to_outq={fd: process})
    draining = Draining(SimpleNamespace(pool=SimpleNamespace(_pool=pool)))
    assert not draining._hear(0)
