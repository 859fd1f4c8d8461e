"""Extends Celery's workers and their remote control: steps, requests, `install`."""
