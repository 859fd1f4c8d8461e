from django.tasks import task


@task(queue_name="reports")
def report(day: str) -> str:
    return f"the report of {day}"
