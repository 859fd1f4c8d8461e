"""Makes Kombu know `delayed+redis://` in programs that import nothing of ours.

`kombu_delayed.pth` imports this module when Python starts, so it must cost nothing: it waits until
the program imports Kombu's table of transports, and adds to it. Kombu's own hook, the entry points
of `kombu.serializers`, is not read by a program that only opens a `kombu.Connection`.

It is there before pytest is, which would warn of that: PYTEST_DONT_REWRITE
"""

import sys


class _AfterKombuTransport:
    def find_spec(self, name, path=None, target=None):
        if name != "kombu.transport":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader):
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        try:
            import kombu_delayed.registration  # noqa: F401
        except ImportError:  # this package was removed by half: Kombu goes on without it
            return

    loader.exec_module = exec_module


sys.meta_path.insert(0, _AfterKombuTransport())
