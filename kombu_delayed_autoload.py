"""Makes Kombu know `delayed+redis://`, and workers end well, where nothing of ours is imported.

`kombu_delayed.pth` imports this module when Python starts, so it must cost nothing: it waits until
the program imports Kombu's table of transports, or Celery's worker, and adds to it. Kombu's own
hook, the entry points of `kombu.serializers`, is not read by a program that only opens a
`kombu.Connection`, and Celery's, `celery.commands`, not by one that starts a worker by itself.

It is there before pytest is, which would warn of that: PYTEST_DONT_REWRITE
"""

import sys


class _After:
    """Imports a module of ours when the program has imported another one."""

    def __init__(self, name, ours):
        self._name, self._ours = name, ours

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._import_after(spec.loader)
        return spec

    def _import_after(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            try:
                __import__(self._ours)
            except ImportError:  # this package was removed by half: they go on without it
                return

        loader.exec_module = exec_module


sys.meta_path[:0] = [
    _After("kombu.transport", "kombu_delayed.registration"),
    _After("celery.worker", "celery_ext.workers"),
]
