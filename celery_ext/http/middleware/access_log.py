"""Logs requests: never a token, a query or a body."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from starlette.types import Scope

audit = logging.getLogger("celery_ext.http.audit")
access = logging.getLogger("celery_ext.http.access")

#: How many characters of a path are logged.
SHOWN = 200

#: Formats of the logs.
FORMATS = ("text", "json")


def tell(scope: Scope, status: int, seconds: float) -> None:
    """Log a request: in the audit log if it is an action or was denied, and in the access log."""
    action, target = scope.get("delayed.audit", ("", ""))
    if action or status in (401, 403):
        request = f"{scope['method']} {scope['path'][:SHOWN]}"
        line = {**_who(scope), "action": action or request, "target": target, "status": status}
        audit.info("%s", json.dumps(line), extra={"fields": line})
    if access.isEnabledFor(logging.INFO):
        line = {
            **_who(scope),
            "method": scope["method"],
            "path": scope["path"][:SHOWN],
            "status": status,
            "ms": round(seconds * 1000, 1),
        }
        access.info("%s", json.dumps(line), extra={"fields": line})


def _who(scope: Scope) -> dict[str, Any]:
    identity, client = scope.get("delayed.identity"), scope.get("client") or ("",)
    return {"who": identity.name if identity else "", "from": client[0]}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, and the record's fields or message."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def show_logs(form: str, *, requests: bool) -> None:
    """Write logs to standard error: all in JSON, or those without a handler as text.

    With `requests` each request is logged, not only those that change something or are refused.
    """
    audit.setLevel(logging.INFO)
    access.setLevel(logging.INFO if requests else logging.WARNING)
    root = logging.getLogger()
    if form == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        root.handlers[:] = [handler]
        root.setLevel(min(root.level, logging.INFO) or logging.INFO)
        return
    for each in (audit, access):
        if not each.handlers and not root.handlers:
            handler = logging.StreamHandler()
            name = each.name.rpartition(".")[2]
            handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(message)s"))
            each.addHandler(handler)
