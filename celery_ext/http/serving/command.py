"""Shared by the commands that serve the API: their options, and running the server."""

from __future__ import annotations

import gc
import re
import ssl
from pathlib import Path
from typing import Any

import click

from celery_ext.app.commands import all_of


def _root_path(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"(/[\w.~-]+)+", value):
        raise click.BadParameter(f"{value!r} is not a path, such as /delayed")
    return value


def _host_names(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    for value in values:
        if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", value):
            raise click.BadParameter(
                f"{value!r} is not a host name without scheme and port, such as tasks.example.com"
            )
    return values


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

#: The options of a server: where it listens, and who may call it.
serve_options = all_of(
    click.option("--host", default="127.0.0.1", show_default=True),
    click.option("--port", type=click.IntRange(0, 65_535), default=8080, show_default=True),
    click.option(
        "--name",
        "names",
        multiple=True,
        metavar="HOST",
        callback=_host_names,
        help="The host name of a proxy; repeatable. Requests then need a token.",
    ),
    click.option(
        "--root-path",
        default="",
        metavar="PATH",
        callback=_root_path,
        help="The path prefix that a proxy removes from requests.",
    ),
    click.option("--access-log/--no-access-log", help="Log each request."),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="Format of logs; json: one object per line.",
    ),
    click.option(
        "--token/--no-token",
        "needs_token",
        default=None,
        help="Whether requests need a token. From other machines they always do.",
    ),
    click.option("--certfile", type=_FILE, help="Certificate for https."),
    click.option("--keyfile", type=_FILE, help="Private key of the certificate."),
)


def run(
    app: Any,
    *,
    host: str,
    port: int,
    needs_token: bool | None,
    names: tuple[str, ...],
    root_path: str,
    certfile: Path | None,
    keyfile: Path | None,
    log_format: str,
    access_log: bool,
    jobs_only: bool = False,
) -> None:
    """Serve until a signal. Raises ClickException for errors that the user can fix."""
    try:
        from ..app import Api
        from ..middleware import show_logs
        from .server import LOOPBACK_HOSTS, is_loopback, make_server
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"this needs {error.name}: pip install 'kombu-delayed[http]'"
        ) from error
    is_local = is_loopback(host) and not names
    if needs_token is False and not is_local:
        beyond = ", ".join(names) or host
        raise click.UsageError(f"--no-token is for this machine alone, and {beyond} is more")
    if keyfile is not None and certfile is None:
        raise click.UsageError("--keyfile needs --certfile, the certificate of that key")
    needs_token = not is_local if needs_token is None else needs_token
    show_logs(log_format, requests=access_log)
    hosts = (*LOOPBACK_HOSTS, *([host] if is_loopback(host) else []), *names)
    allowed = hosts if is_local or names else ()
    api = Api(app, needs_token=needs_token, jobs_only=jobs_only, hosts=allowed)
    api.service.check_broker()
    more: dict[str, Any] = {"log_config": None} if log_format == "json" else {}
    more |= {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "root_path": root_path}
    _serve(make_server(api, host, port, **more))


def _serve(server: Any) -> None:
    # Collecting garbage blocks all requests, so it should skip the objects that stay.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    except ssl.SSLError as error:
        raise click.ClickException(f"--certfile or --keyfile cannot be used: {error}") from error
    except SystemExit as end:
        if isinstance(end.__context__, OSError):  # it cannot listen
            raise click.ClickException(str(end.__context__)) from end
        raise
