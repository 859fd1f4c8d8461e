"""Coverage-guided fuzzing of the envelope, its headers and its times.

python -m tests.properties.fuzz_envelope -max_total_time=60
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kombu_delayed", "kombu.utils.json", "dateutil"]):
    from kombu_delayed.message.envelope import eta_to_ms
    from tests.properties.test_fuzz import MESSAGE, check_due, check_envelope


SEEDS = [json.dumps(MESSAGE).encode(), b"2026-01-01T12:00:00.000001+00:00", b"9999-12-31T24:00"]


def test_one_input(data: bytes) -> None:
    check_envelope(data)
    text = data.decode(errors="surrogateescape")
    check_due({"headers": {"eta": text}})
    check_due({"headers": {"x-delay": text}})
    try:
        at_ms = eta_to_ms(text)
    except ValueError:
        return
    assert -62_135_683_200_000 <= at_ms <= 253_402_387_200_000


def main() -> None:
    logging.disable()
    with tempfile.TemporaryDirectory() as corpus:
        for n, seed in enumerate(SEEDS):
            Path(corpus, str(n)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
