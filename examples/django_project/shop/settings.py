import os

import django

SECRET_KEY = "for this example only"
ALLOWED_HOSTS = ["localhost"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "shop.views"
USE_TZ = True
TIME_ZONE = "UTC"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}

CELERY_BROKER_URL = os.environ.get("BROKER_URL", "delayed+redis://localhost:6379/0")
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": "shop:", "delayed_max_deliveries": 5}
CELERY_RESULT_BACKEND = os.environ.get("RESULT_BACKEND", "redis://localhost:6379/1")

# For Django's own tasks, from Django 6 on.
CELERY_IMPORTS = ["celery_ext.django"] if django.VERSION >= (6,) else []
TASKS = {
    "default": {
        "BACKEND": "celery_ext.django.CeleryBackend",
        "QUEUES": ["default", "reports"],
        "OPTIONS": {"app": "shop.celery:app"},
    }
}
