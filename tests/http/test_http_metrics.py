from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "kombu_delayed_"


def value(api: httpx.Client, name: str, **labels: str) -> float:
    answer = api.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return sum(
        sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    )


def test_what_is_scheduled_is_counted(api: httpx.Client) -> None:
    before = value(api, "scheduled_total", queue="mail")
    given = {"task": "till.send_mail", "queue": "mail", "delay": "30s"}
    for _ in range(3):
        assert api.post("/v1/tasks", json=given).status_code == 201
    assert api.post("/v1/tasks", json={**given, "delay": None}).status_code == 201
    assert value(api, "scheduled_total", queue="mail") == before + 3
    assert value(api, "delayed_messages", queue="celery") == 0
    api.api.service.forget_names()  # type: ignore[attr-defined]
    assert value(api, "delayed_messages", queue="mail") == 3
    assert value(api, "due_within_messages", queue="mail", horizon="minute") == 3
    assert value(api, "work_messages", queue="mail") == 4


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "autoscaling.md"


def test_keda_finds_its_number(api: httpx.Client) -> None:
    """The triggers of the guide, of the queue `mail`."""
    for delay in ("30s", "1h"):
        given = {"task": "till.send_mail", "queue": "mail", "delay": delay}
        assert api.post("/v1/tasks", json=given).status_code == 201
    api.api.service.forget_names()  # type: ignore[attr-defined]
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    specs = [block.get("spec", block) for block in map(yaml.safe_load, blocks)]
    found = {each["type"]: each["metadata"] for spec in specs for each in spec["triggers"]}
    answer = api.get(re.sub(r"^http://[^/]*", "", found["metrics-api"]["url"]))
    assert answer.json()[found["metrics-api"]["valueLocation"]] == 1
    query = found["prometheus"]["query"]
    parts = re.fullmatch(rf'max\({PREFIX}(\w+)\{{queue="(\w+)"\}}\)', query)
    assert parts is not None
    assert value(api, parts[1], queue=parts[2]) == 1


@pytest.mark.parametrize(
    ("method", "path", "labels"),
    [
        ("GET", "/v1/tasks/a", {"method": "GET", "route": "/v1/tasks/{id}", "status": "404"}),
        ("GET", "/nowhere/a", {"method": "GET", "route": "other", "status": "404"}),
        ("PROPFIND", "/v1/tasks", {"method": "other", "route": "other", "status": "405"}),
        ("GET", "/metrics", {"method": "GET", "route": "/metrics", "status": "200"}),
    ],
)
def test_requests_are_counted(
    api: httpx.Client, method: str, path: str, labels: dict[str, str]
) -> None:
    before = value(api, "http_requests_total", **labels)
    api.request(method, path)
    extra = 1 if path == "/metrics" else 0  # the first look counts itself
    assert value(api, "http_requests_total", **labels) == before + 1 + extra
    where = {name: labels[name] for name in ("method", "route")}
    assert value(api, "http_request_seconds_count", **where) > 0


def test_what_is_polled_is_counted(api: httpx.Client) -> None:
    queue = "http.default.counted"
    names = ("delivered_total", "reclaimed_total", "redelivered_total")
    before = [value(api, name, queue=queue) for name in names]
    payload = {"topics": "counted", "callbackFuncName": "f", "args": []}
    task = {"id": "a", "namespace": "default", "delay": "0.2s", "score": 1, "payload": payload}
    assert api.put("/v1/delayedqueue", json=task).status_code == 201
    for lease in ("0.05s", "60s"):
        given = {"topics": "counted", "wait": "20s", "lease": lease}
        assert api.get("/v1/delayedqueue/poll", params=given).json()["tasks"]
    counts = [value(api, name, queue=queue) for name in names]
    assert [a - b for a, b in zip(counts, before, strict=True)] == [2, 1, 1]
    assert value(api, "delivery_lateness_seconds_count", queue=queue) == counts[0]
