"""The app for tests with policies from its setting `declares`: plain data, by queue."""

from __future__ import annotations

from typing import Any

from celery_ext import install
from celery_ext.policies import Fair
from celery_ext.policies.written import Code, restored
from tests.kit.tasks_app import Settings, make_app


def region(message: Any) -> str:
    return "east"


settings = Settings.from_environment()
app = make_app(settings)
declares = app.conf.declares
app.conf.broker_transport_options = {
    **settings.transport_options,
    "delayed_policies": {
        queue: [restored(each, Code([Fair(by=region)])) for each in declares[queue]]
        for queue in declares
    },
}
install(app)
