"""The commands `jobs` and `forget`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from celery_ext.spark import JobState, forget_job, jobs
from celery_ext.tasks.formatting import moment

from .group import connection_options, main


@main.command("jobs")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each job.")
def jobs_command(as_json: bool, **options: Any) -> None:
    """List the jobs that wrote to a broker, the newest first.

    A silent job has not reported for a minute. If its driver was lost, run the same command again
    with its --job-id.
    """
    found = jobs(**options)
    if as_json:
        for job in found:
            rate, percent = round(job.rows_per_second, 1), job.percent
            facts = {**asdict(job), "rows_per_second": rate, "percent": percent}
            click.echo(json.dumps(facts, default=lambda at: at.isoformat()))
        return
    for job in found:
        click.echo(_lines(job))


def _lines(job: JobState) -> str:
    what = " ".join(filter(None, (job.operation, job.label)))
    heard = "" if job.state in ("ended", "failed") else f", last report {moment(job.heard_at)}"
    text = f"{job.job_id}  {job.state}, started {moment(job.begun_at)}{heard}: {what}\n"
    part = f" of {job.total_rows:,} ({job.percent:.0f} %)" if job.total_rows else ""
    text += f"    {job.rows:,}{part} rows, {job.rows_per_second:,.0f}/s"
    if job.accepted is not None:
        text += f": {job.accepted:,} accepted, {job.already:,} already, {job.refused:,} refused"
    return text


@main.command("forget")
@click.argument("job_id")
@connection_options
@click.option("--force", is_flag=True, help="Forget it even if it is running.")
def forget_command(job_id: str, force: bool, **options: Any) -> None:
    """Drop the ledger of a job that has ended.

    If the job runs again, it repeats all of its rows.
    """
    count = forget_job(job_id, force=force, **options)
    click.echo(f"forgotten: {job_id}" if count else f"nothing is kept of job {job_id!r}")
