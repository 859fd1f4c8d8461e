"""Signals of what happens to delayed tasks, in the process that does it.

`task_cancelled` comes with `info`, the TaskInfo of the task that was dropped; `task_rescheduled`
with `task_id` and `eta` (ISO 8601, None for a task that is to run now). The sender is the app.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

task_cancelled = Signal(name="task_cancelled", providing_args={"info"})
task_rescheduled = Signal(name="task_rescheduled", providing_args={"task_id", "eta"})
