from celery import shared_task


@shared_task
def remind(user_id: int) -> None:
    print(f"user {user_id}: you have something in your basket")
