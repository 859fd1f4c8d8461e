"""The transport behind `delayed+redis://` and its siblings."""

from __future__ import annotations

from functools import cache
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as stock

from ..connection import forks, urls
from ..connection.cluster.nodes import Cluster
from ..connection.native import get_logger
from ..connection.options import Options, check_kombu_options
from ..consumer.policy.decisions import rules_of
from ..registration import watch_workers
from .alternates import check_alternates
from .channel.channel import Channel
from .cluster.channel import ClusterChannel
from .cluster.connecting import ClusterMasters
from .polling.poller import Poller
from .sentinel_channel import SentinelChannel

logger = get_logger(__name__)


@cache
def _warn_of_visibility_timeout() -> None:
    logger.warning(
        "The transport option visibility_timeout has no effect: a message is delivered again when "
        "its consumer has died, not when its task takes long; see delayed_lease_seconds."
    )


forks.watch()


class Transport(stock.Transport):
    """Kombu's Redis transport with a backlog."""

    Channel = Channel
    can_parse_url = True  # so that Kombu asks it for the URL

    #: Named, so that Kombu keeps trying when a new connection meets the same refusal. There are no
    #: recoverable channel errors: Kombu would retry a server's refusal at once and forever.
    recoverable_connection_errors = stock.Transport.connection_errors
    recoverable_channel_errors = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        watch_workers()
        urls.take_credentials(client)
        urls.name_server(client)
        super().__init__(client, **kwargs)
        if urls.scheme_of(client) in urls.SENTINELS:
            self.Channel = SentinelChannel
        elif urls.scheme_of(client) in urls.CLUSTERS:
            self.Channel = ClusterChannel
        #: For a Cluster: the known nodes, and the results of checks of its masters.
        self.cluster: Cluster | None = None
        self.cluster_masters = ClusterMasters()
        self.cycle = Poller()

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The broker URL, by default with a masked password."""
        return urls.as_uri(self.client, include_password, mask)

    def establish_connection(self) -> Any:
        """Connect. Raises OptionError, UrlError or ServerError if you must change something."""
        check_kombu_options(self.client.transport_options)
        rules_of(Options.parse(self.client.transport_options).policies)
        check_alternates(self.client.alt)
        if "visibility_timeout" in self.client.transport_options:
            _warn_of_visibility_timeout()
        return super().establish_connection()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Wait for one message or event. Raises `socket.timeout` after `timeout` seconds."""
        end = None if timeout is None else monotonic() + timeout
        while True:
            try:
                return self.cycle.get(self._deliver, None if end is None else end - monotonic())
            except Empty:
                if end is not None and (self.cycle.take_interrupt() or monotonic() >= end):
                    raise TimeoutError from None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Move to Kombu's event loop."""
        options = self.client.transport_options
        self.cycle.attach(loop)
        health_seconds = options.get("health_check_interval", self.Channel.health_check_interval)
        duties = {
            "maybe_check_subclient_health": health_seconds,
            "maybe_reauth": options.get("reauth_check_interval", 10),
            "maybe_refresh_binding_expiry": 1,
        }
        for name, interval_seconds in duties.items():
            if interval_seconds and hasattr(self.cycle, name):  # older Kombu has fewer
                self.cycle.repeat(interval_seconds, getattr(self.cycle, name))
