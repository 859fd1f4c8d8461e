"""The files of `examples/deploy` obey other programs' rules and use our names correctly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import metadata, requires, version
from pathlib import Path
from typing import Any

import click
import httpx
import kubernetes_validate
import pytest
import yaml
from celery import Celery, _state
from celery.bin.celery import celery as celery_command
from packaging.requirements import Requirement

from celery_ext.http.app import OPERATIONS
from celery_ext.http.auth.identity import SCOPES
from celery_ext.http.serving.command import serve_options
from celery_ext.http.serving.server import GRACE_SECONDS
from celery_ext.metrics import MetricsOptions
from celery_ext.metrics.names import METRICS, PREFIX
from tests.kit.servers import Server, available_kinds, free_port, missing, start_server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT, Worker

pytestmark = pytest.mark.thorough

FOLDER = ROOT / "examples" / "deploy"
GUIDE = ROOT / "docs" / "operations.md"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
IMAGE = "delayed-app:1"
KEDA = ("keda.yaml", "keda-without-prometheus.yaml")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


COMPOSE = documents("compose.yaml")[0]
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS = documents("prometheus.yml")[0]
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in documents("kubernetes.yaml")}
PODS: dict[str, dict[str, Any]] = {
    name: each["spec"]["template"]["spec"]
    for (_, name), each in OBJECTS.items()
    if "template" in each.get("spec", ())
}
CONTAINERS = {name: container for name, pod in PODS.items() for container in pod["containers"]}
OURS = {name for name, each in CONTAINERS.items() if each["image"] == IMAGE}


def instruction(name: str) -> Any:
    """Return the command that this instruction of the Dockerfile runs, in its exec form."""
    pattern = rf"^{name} (?:.*\\\n\s+CMD )?(\[.*\])$"
    (found,) = re.findall(pattern, DOCKERFILE, re.MULTILINE)
    return json.loads(found)


def shell_words(text: str) -> Iterator[list[str]]:
    """The arguments of each call of celery in a shell's text."""
    for found in re.finditer(r"\bcelery (-A [^>&|;\n]+)", text):
        yield shlex.split(found[1], comments=True)


def command_lines() -> Iterator[list[str]]:
    """The arguments of all calls of celery."""
    begin = instruction("ENTRYPOINT")
    assert begin[0] == "celery"
    yield [*begin[1:], *instruction("CMD")]
    yield from ([*begin[1:], *CONTAINERS[name]["args"]] for name in OURS)
    for service in SERVICES.values():
        if service.get("image") == IMAGE and "entrypoint" not in service:
            yield [*begin[1:], *service["command"]]
    yield from shell_words(" ".join(SERVICES["token"]["command"]))
    yield from shell_words((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    for block in re.findall(r"^```\n(.*?)^```$", section(), re.MULTILINE | re.DOTALL):
        yield from shell_words(block)


def section() -> str:
    """Return the guide's section about these files."""
    found = re.search(r"^## Deploy .*?(?=^## )", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def app() -> Iterator[Celery]:
    """The app of app.py, in this process."""
    before = _state.default_app, _state._tls.current_app
    spec = importlib.util.spec_from_file_location("deployed_app", FOLDER / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.app
    module.app.delayed.close()
    module.app.close()
    _state.default_app, _state._tls.current_app = before


# The rules of other programs.


def test_compose() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(FOLDER / "compose.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("named", OBJECTS, ids="/".join)
def test_kubernetes(named: tuple[str, str]) -> None:
    kubernetes_validate.validate(OBJECTS[named], kubernetes_validate.latest_version(), strict=True)


def test_the_dockerfile_as_a_linter_sees_it() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists():
        missing("hadolint has no wheel for this platform")
    done = subprocess.run(
        [linter, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


# The files agree with each other.


def test_the_image() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["10001"]
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert not re.search(r"\bpip\b|\bapt|\bgcc\b", last)
    kept = (FOLDER / ".dockerignore").read_text(encoding="utf-8").split()
    for copied in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in copied.split():
            assert f"!{name}" in kept
            assert "*" in name or (FOLDER / name).exists()
    for name in OURS:
        assert PODS[name]["securityContext"]["runAsUser"] == 10001
        assert "command" not in CONTAINERS[name]  # it would replace celery
    assert {name for name, each in SERVICES.items() if "build" in each} == {*OURS, "token"}


def test_compose_names_what_is_there() -> None:
    for name, service in SERVICES.items():
        assert {*service.get("depends_on", ())} <= {*SERVICES}, name
        for mount in service.get("volumes", ()):
            source, target = mount.split(":")[:2]
            assert target.startswith("/")
            found = (
                (FOLDER / source).is_file() if source[0] == "." else source in COMPOSE["volumes"]
            )
            assert found, mount
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> what is there."""
    return {each.split(":")[1]: each.split(":")[0] for each in SERVICES[service]["volumes"]}


def test_prometheus_and_grafana_find_their_files() -> None:
    found, home = mounts("prometheus"), "/etc/prometheus"
    assert found[f"{home}/prometheus.yml"] == "./prometheus.yml"
    for rules in PROMETHEUS["rule_files"]:
        assert f"{home}/{rules}" in found
    server, workers = PROMETHEUS["scrape_configs"]
    folder, token = server["authorization"]["credentials_file"].split("/")
    assert found[f"{home}/{folder}"] == mounts("token")[SERVICES["token"]["working_dir"]]
    assert f"mv new {token}" in SERVICES["token"]["command"][0]
    hosts = {
        target.partition(":")[0] for each in server["static_configs"] for target in each["targets"]
    }
    hosts |= {name for each in workers["dns_sd_configs"] for name in each["names"]}
    assert hosts == {"http", "worker"}
    for host in hosts:  # both are names of services in Compose and in Kubernetes
        assert host in SERVICES
        assert ("Service", host) in OBJECTS
    (source,) = documents("grafana/datasources.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    (provider,) = documents("grafana/dashboards.yaml")[0]["providers"]
    boards = [path for path in mounts("grafana") if path.startswith(provider["options"]["path"])]
    assert len(boards) == 1
    (board,) = ((FOLDER / mounts("grafana")[path]).resolve() for path in boards)
    assert {each["type"] for each in json.loads(board.read_text())["templating"]["list"]} == {
        "datasource",
        "query",
    }


def test_kubernetes_names_what_is_there() -> None:
    keys = OBJECTS["Secret", "delayed"]["stringData"]
    used = set()
    for (kind, name), each in OBJECTS.items():
        if kind == "Service":
            assert each["spec"]["selector"] == {"app": name}
            (port,) = each["spec"]["ports"]
            (known,) = CONTAINERS[name]["ports"]
            assert port.get("targetPort", port["port"]) in (known["name"], known["containerPort"])
        elif name in PODS:
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels == {"app": name}
    for name, container in CONTAINERS.items():
        for variable in container["env"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "delayed"
            used.add(reference["key"])
        ports = [port["name"] for port in container.get("ports", ())]
        for kind, probe in container.items():
            if kind.endswith("Probe") and "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
        volumes = {each["name"] for each in PODS[name].get("volumes", ())}
        volumes |= {
            each["metadata"]["name"]
            for owner in OBJECTS.values()
            for each in owner.get("spec", {}).get("volumeClaimTemplates", ())
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert PODS[name]["securityContext"]["runAsNonRoot"]
        own = {variable["name"] for variable in container["env"]}
        assert {*re.findall(r"\$\((\w+)\)", str(container["args"]))} <= own
    (known,) = (each for each in documents(KEDA[1]) if each["kind"] == "TriggerAuthentication")
    for reference in known["spec"]["secretTargetRef"]:
        assert reference["name"] == "delayed"
        used.add(reference["key"])
    assert used == {*keys}
    assert all("CHANGE-ME" in value for value in keys.values())


@pytest.mark.parametrize("name", KEDA)
def test_keda(name: str, app: Celery) -> None:
    (scaled,) = (each for each in documents(name) if each["kind"] == "ScaledObject")
    assert ("Deployment", scaled["spec"]["scaleTargetRef"]["name"]) in OBJECTS
    (trigger,) = scaled["spec"]["triggers"]
    given = trigger["metadata"]
    assert all(isinstance(value, str) for value in given.values())  # KEDA takes nothing else
    queue = app.conf.task_default_queue
    if trigger["type"] == "prometheus":
        metric, matchers = re.findall(rf"\b{PREFIX}(\w+){{(.*?)}}", given["query"])[0]
        assert dict(re.findall(r'(\w+)="(.*?)"', matchers)) == {"queue": queue}
        assert METRICS[metric].labels == ("queue",)
        assert float(given["threshold"]) > 0
    else:
        host, path = re.findall(r"^http://(\w+):8080(/.*)$", given["url"])[0]
        assert ("Service", host) in OBJECTS
        assert path.replace(f"/{queue}/", "/{queue}/") in {each.path for each in OPERATIONS}
        assert float(given["targetValue"]) > 0


# The files agree with the project.


def test_requirements() -> None:
    text = (FOLDER / "requirements.txt").read_text(encoding="utf-8")
    (wanted,) = (Requirement(line) for line in text.splitlines() if not line.startswith("#"))
    assert wanted.name == "kombu-delayed"
    assert wanted.extras <= {*(metadata("kombu-delayed").get_all("Provides-Extra") or ())}
    assert wanted.specifier.contains(version("kombu-delayed"), prereleases=True)
    brought, extras = set(), {*wanted.extras}
    for _ in range(3):  # extras of ours bring others
        for each in map(Requirement, requires("kombu-delayed") or ()):
            if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in extras):
                brought.add(each.name)
                extras |= each.extras if each.name == "kombu-delayed" else set()
    assert {"prometheus-client", "rich", "uvicorn"} <= brought


def test_command_lines() -> None:
    found = list(command_lines())
    assert len(found) > 10
    for words in found:
        command: click.Command = celery_command
        context = click.Context(command, info_name="celery")
        named, rest = [], words
        while True:
            given, rest, _ = command.make_parser(context).parse_args(list(rest))
            if not isinstance(command, click.Group):
                break
            named.append(rest.pop(0))
            inner = command.get_command(context, named[-1])
            assert inner is not None, words
            command, context = inner, click.Context(inner, context, named[-1])
        assert named[0] in {"worker", "beat", "delayed"}
        assert {*given.get("scopes", ())} <= {*SCOPES}
        assert not rest or named[1:] == ["token", "create"], words


def test_variables() -> None:
    source = (FOLDER / "app.py").read_text(encoding="utf-8")
    read = {*re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", source)}
    assert read == {"BROKER_URL"}
    for name in OURS:
        assert {each["name"] for each in CONTAINERS[name]["env"]} == read
        assert {*SERVICES[name]["environment"]} == read


def test_ports(app: Celery) -> None:
    measured = MetricsOptions.of(app)
    assert measured is not None
    default = MetricsOptions()
    assert (measured.host, measured.port) == ("0.0.0.0", default.port)
    serve = serve_options(click.Command("serve", callback=lambda: None))
    (http,) = (each.default for each in serve.params if each.name == "port")
    assert re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE) == [f"{http} {measured.port}"]
    assert f":{measured.port}/metrics'" in instruction("HEALTHCHECK")[-1]
    assert f":{http}/healthz'" in SERVICES["http"]["healthcheck"]["test"][-1]
    assert SERVICES["http"]["ports"] == [f"127.0.0.1:{http}:{http}"]
    server, workers = PROMETHEUS["scrape_configs"]
    assert server["static_configs"] == [{"targets": [f"http:{http}"]}]
    assert [each["port"] for each in workers["dns_sd_configs"]] == [measured.port]
    for name, port in (("worker", measured.port), ("http", http)):
        assert [each["containerPort"] for each in CONTAINERS[name]["ports"]] == [port]
        assert [each["port"] for each in OBJECTS["Service", name]["spec"]["ports"]] == [port]


def test_there_is_time_to_end(app: Celery) -> None:
    def compose(name: str) -> float:
        return float(SERVICES[name]["stop_grace_period"].removesuffix("s"))

    longest = app.conf.task_time_limit
    assert app.conf.task_acks_late
    assert compose("worker") > longest
    assert PODS["worker"]["terminationGracePeriodSeconds"] > longest
    assert compose("http") > GRACE_SECONDS
    pause = CONTAINERS["http"]["lifecycle"]["preStop"]["exec"]["command"]
    grace = PODS["http"]["terminationGracePeriodSeconds"]
    assert grace > GRACE_SECONDS + float(pause[1])


def settings(words: list[str]) -> dict[str, str]:
    """The settings of a Redis server, as its command line has them."""
    assert words[0] == "redis-server"
    names, values = words[1::2], words[2::2]
    assert all(name.startswith("--") for name in names)
    return {name[2:]: value for name, value in zip(names, values, strict=True)}


def test_redis_has_the_settings_of_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    block = re.search(r"^## The server\s+```\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    wanted = dict(line.split("#")[0].split() for line in block[1].splitlines())
    compose = settings(SERVICES["redis"]["command"])
    assert wanted.items() <= compose.items()
    kubernetes = settings(CONTAINERS["redis"]["args"])
    assert kubernetes == {**compose, "requirepass": "$(REDIS_PASSWORD)"}
    password = OBJECTS["Secret", "delayed"]["stringData"]["redis-password"]
    assert f":{password}@redis:6379" in OBJECTS["Secret", "delayed"]["stringData"]["broker-url"]


# All of it, as processes.


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Server]:
    config = settings(SERVICES["redis"]["command"])
    config.pop("maxmemory")
    with start_server(available_kinds()[0], tmp_path / "redis", port=0, config=config) as server:
        yield server


@pytest.mark.smoke
def test_it_runs(redis_server: Server, tmp_path: Path) -> None:
    port, pages = free_port(), free_port()
    # The same app with a separate port, since tests run at the same time.
    (tmp_path / "tried.py").write_text(
        "from app import app\n"
        f"app.conf.delayed_metrics = {{**app.conf.delayed_metrics, 'port': {pages}}}\n"
    )
    path = os.pathsep.join(map(str, (ROOT, FOLDER, tmp_path)))
    environment = {"PYTHONPATH": path, "BROKER_URL": f"delayed+{redis_server.url}"}

    def process(name: str, *more: str) -> Worker:
        words = [sys.executable, "-m", "celery", "-A", "tried", *SERVICES[name]["command"], *more]
        words = [word.replace("/var/lib/app", str(tmp_path)) for word in words]
        return Worker(
            Settings(), tmp_path, name=name, env=environment, command=words, root=tmp_path
        )

    def run(*words: str) -> str:
        done = subprocess.run(
            words,
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    celery = [sys.executable, "-m", "celery", "-A", "tried"]
    worker = process("worker")
    http = process("http", "--port", str(port))
    beat = process("beat")
    try:
        for each in (worker, http, beat):
            each.start(wait=False)
        beat.wait_for_log("beat: Starting", 60)
        http.wait_for_log("Uvicorn running", 60)
        worker.wait_for_log(" ready.", 60)

        # The token, as its service makes it, and again: it stays.
        script = SERVICES["token"]["command"][0]
        script = script.replace("celery -A app --workdir /app", shlex.join(celery))
        for _ in range(2):
            run("sh", "-c", script)
        token = (tmp_path / "metrics").read_text().strip()
        api = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=40)
        with api:
            assert api.get("/metrics").status_code == 401
            api.headers["authorization"] = f"Bearer {token}"
            wait_until(
                lambda: 'work_messages{queue="celery"}' in api.get("/metrics").text,
                "the queue is known",
            )
            answer = api.get("/v1/queues/celery/metrics").json()
            given = documents(KEDA[1])[1]["spec"]["triggers"][0]["metadata"]
            assert isinstance(answer[given["valueLocation"]], int)

            send = "from app import remind; remind.apply_async(('Ada',), countdown=0.5)"
            run(sys.executable, "-c", send)
            worker.wait_for_log("Ada, it is time", 30)

            def probed(name: str, kind: str) -> int:
                path = CONTAINERS[name][f"{kind}Probe"]["httpGet"]["path"]
                base = f"http://127.0.0.1:{pages if name == 'worker' else port}"
                return httpx.get(base + path, timeout=40).status_code

            both = ("startup", "liveness")
            assert {probed(name, kind) for name in ("worker", "http") for kind in both} == {200}
            assert probed("http", "readiness") == 200
            check = SERVICES["http"]["healthcheck"]["test"][1:]
            image = instruction("HEALTHCHECK")
            for words, old, new in ((check, 8080, port), (image, 9540, pages)):
                assert words[0] == "python"
                run(sys.executable, *(each.replace(f":{old}/", f":{new}/") for each in words[1:]))
            page = httpx.get(f"http://127.0.0.1:{pages}/metrics").text
            assert f"{PREFIX}delivered_total" in page
            assert f"{PREFIX}work_messages" not in page
            assert "Nothing is wrong" in run(*celery, "delayed", "doctor")

            # While Redis is away, nothing is restarted, and the server is not ready.
            redis_server.kill()
            assert probed("http", "readiness") == 503
            assert {probed(name, "liveness") for name in ("worker", "http")} == {200}
            redis_server.restart()
            wait_until(lambda: probed("http", "readiness") == 200, "it is ready again", 60, 0.2)
            worker.wait_for_log("The broker is back", 60)
        assert worker.stop() == 0
        assert http.stop() in (0, -signal.SIGTERM)
        assert beat.stop() == 0
    finally:
        for each in (worker, http, beat):
            each.kill()
