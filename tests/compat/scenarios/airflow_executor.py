"""CeleryExecutor of Airflow 3: a scheduler and a worker run a DAG."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from common import BROKER, REDIS, TRANSPORT, check, free_port, main, running, wait_until

DAG = """
from datetime import datetime
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("compat", start_date=datetime(2024, 1, 1), schedule=None, catchup=False):
    BashOperator(task_id="one", bash_command="true") >> BashOperator(
        task_id="two", bash_command="true"
    )
"""
HOME = Path("airflow").absolute()
AIRFLOW = Path(sys.executable).with_name("airflow")
PORT = free_port()

os.environ |= {
    "AIRFLOW_HOME": str(HOME),
    "AIRFLOW__CORE__DAGS_FOLDER": str(HOME / "dags"),
    "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
    "AIRFLOW__CELERY__BROKER_URL": BROKER,
    "AIRFLOW__CELERY__RESULT_BACKEND": f"{REDIS.rpartition('/')[0]}/1",
    # Workers report to the API server.
    "AIRFLOW__API__PORT": str(PORT),
    "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
    "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{PORT}/execution/",
    # SQLite is enough for a test on one machine.
    "_AIRFLOW__SKIP_DATABASE_EXECUTOR_COMPATIBILITY_CHECK": "1",
}
if TRANSPORT:
    # It has no option for this, so its settings come from a module.
    HOME.mkdir(exist_ok=True)
    (HOME / "compat_airflow_settings.py").write_text(
        "from airflow.providers.celery.executors.default_celery import DEFAULT_CELERY_CONFIG\n"
        f"CONFIG = {{**DEFAULT_CELERY_CONFIG, 'broker_transport': '{TRANSPORT}'}}\n"
    )
    os.environ["AIRFLOW__CELERY__CELERY_CONFIG_OPTIONS"] = "compat_airflow_settings.CONFIG"
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HOME)])


def airflow(*command: str) -> str:
    return subprocess.run([AIRFLOW, *command], capture_output=True, text=True, check=True).stdout


@check("a DAG of two tasks runs")
def runs() -> None:
    (HOME / "dags").mkdir(parents=True, exist_ok=True)
    (HOME / "dags" / "compat.py").write_text(DAG)
    airflow("db", "migrate")
    server = running(str(AIRFLOW), "api-server", until="startup complete")
    parser = running(str(AIRFLOW), "dag-processor")
    scheduler = running(str(AIRFLOW), "scheduler", "--skip-serve-logs")
    worker = running(str(AIRFLOW), "celery", "worker", "--skip-serve-logs", until=" ready.")
    with server, parser, scheduler, worker:
        wait_until(lambda: "compat" in airflow("dags", "list"), "the DAG is known", 120)
        airflow("dags", "trigger", "compat", "--run-id", "once")
        done = ("dags", "list-runs", "compat", "--state", "success")
        wait_until(lambda: "once" in airflow(*done), "the DAG has run", 180)


if __name__ == "__main__":
    main()
