"""celery-batches: several messages in one run of a task."""

from __future__ import annotations

from celery_batches import Batches
from common import check, main, new_app, wait_until, worker

app = new_app("batches", worker_prefetch_multiplier=10)


@app.task(base=Batches, flush_every=5, flush_interval=2)
def gather(requests) -> None:
    print(f"batch of {len(requests)}: {sorted(each.args[0] for each in requests)}")
    for each in requests:
        app.backend.mark_as_done(each.id, each.args[0], request=each)


def batched(options: tuple[str, ...], **how: object) -> None:
    with worker("batches", *options) as printed:
        results = [gather.apply_async((n,), **how) for n in range(5)]
        assert [each.get(timeout=30) for each in results] == [0, 1, 2, 3, 4]
        wait_until(lambda: "batch of 5: [0, 1, 2, 3, 4]" in printed(), "they were one batch")


check("five messages are one batch")(lambda: batched(("-P", "solo")))
check("the same for delayed messages")(lambda: batched(("-P", "solo"), countdown=2))
check("with the prefork pool")(lambda: batched(("-P", "prefork", "-c", "2")))


@check("an incomplete batch runs after its interval")
def partial() -> None:
    with worker("batches", "-P", "solo"):
        assert gather.delay(7).get(timeout=30) == 7


if __name__ == "__main__":
    main()
