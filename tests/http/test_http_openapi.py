"""The OpenAPI document and what the API does are the same; the pages work without internet."""

from __future__ import annotations

import re
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from celery_ext.http.api.openapi import document
from celery_ext.http.app import OPERATIONS

schema = schemathesis.openapi.from_dict(document(OPERATIONS)).exclude(
    path=["/v1/events", "/v1/bulk", "/v1/delayedqueue/poll"]
)

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_schemathesis(case: Any, api: httpx.Client) -> None:
    case.call_and_validate(base_url=str(api.base_url), checks=CHECKS)


def test_document(api: httpx.Client) -> None:
    found = api.get("/openapi.json").json()
    assert found["openapi"] == "3.1.0"
    ids = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', api.get("/openapi.json").text))
    assert refs <= set(found["components"]["schemas"])


def test_docs_need_no_internet(api: httpx.Client) -> None:
    page, script = api.get("/docs"), api.get("/docs.js")
    assert page.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    for text in (page.text, script.text):
        assert "//" not in re.sub(r"^// .*$", "", text, flags=re.MULTILINE)
        assert "innerHTML" not in text
