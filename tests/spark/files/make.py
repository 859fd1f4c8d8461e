"""Writes the files of this directory: run it with pandas, pyarrow, polars and duckdb installed.

They are kept as they were written, so that tests need none of these. Each has the same rows.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import duckdb  # type: ignore[import-not-found]
import pandas  # type: ignore[import-not-found,import-untyped]
import polars  # type: ignore[import-not-found]
import pyarrow
import pyarrow.parquet

HERE = Path(__file__).parent

ROWS = {
    "id": [9_007_199_254_740_993, 2],
    "task": ["mail.remind"] * 2,
    "eta": [datetime(2100, 7, 1, 9, 30), datetime(2100, 1, 1, 9, 30)],
    "day": [date(2100, 7, 1), date(2100, 1, 1)],
    "priority": [3, None],
    "amount": [Decimal("12.50"), Decimal("0.10")],
    "email": ["ann@example.com", None],
}


def main() -> None:
    table = pyarrow.table(ROWS)
    pyarrow.parquet.write_table(table, HERE / "pyarrow.parquet")
    frame = pandas.DataFrame(ROWS).set_index(pandas.Index(["x", "y"]))
    frame.to_parquet(HERE / f"pandas{pandas.__version__.split('.')[0]}.parquet")
    polars.from_arrow(table).write_parquet(HERE / "polars.parquet")
    duckdb.from_arrow(table).write_parquet(str(HERE / "duckdb.parquet"))


if __name__ == "__main__":
    main()
