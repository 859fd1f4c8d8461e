"""What Celery's workers and their remote control get: steps, requests, `install`."""
