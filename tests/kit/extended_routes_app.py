"""The same app, extended."""

from celery_ext import install
from tests.kit.routes_app import app

install(app)
