"""A Django project whose reminders wait in Redis: run it from the directory above.

celery -A shop worker -Q celery,reports
django-admin runserver --settings shop.settings --pythonpath .
"""

from .celery import app as celery_app

__all__ = ["celery_app"]
