"""Other tools of Celery's users, each driven for real on our transport and on the stock one."""
