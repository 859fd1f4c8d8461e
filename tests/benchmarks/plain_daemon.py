"""PySpark's own daemon, whose workers keep messages as they were sent: see `spark_forms`."""

from __future__ import annotations

from typing import Any

from pyspark.daemon import manager

from kombu_delayed.store.store import Store

_make = Store.__init__


def _make_plain(store: Store, *args: Any, **kwargs: Any) -> None:
    _make(store, *args, **kwargs)
    store.bucket_bytes = 0


if __name__ == "__main__":
    Store.__init__ = _make_plain  # type: ignore[method-assign]
    manager()
