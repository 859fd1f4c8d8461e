"""celery-once: a task that is refused while it waits or runs."""

from __future__ import annotations

from celery_once import AlreadyQueued, QueueOnce
from common import REDIS, check, main, new_app, wait_until, worker

app = new_app("once")
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": f"{REDIS.rpartition('/')[0]}/2", "default_timeout": 600},
}


@app.task(base=QueueOnce)
def only(number: int) -> int:
    return number


def _again() -> object:
    try:
        return only.delay(1)
    except AlreadyQueued:
        return None


@check("a second delayed task is refused until the first has run")
def refuses() -> None:
    result = only.apply_async((1,), countdown=2)
    assert _again() is None, "it was sent twice"
    with worker("once"):
        assert result.get(timeout=30) == 1
        wait_until(_again, "it can be sent again")


if __name__ == "__main__":
    main()
