"""Checks once, when connecting, that a server keeps delayed messages safe."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from time import time
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..connection import format
from ..connection.native import get_logger
from ..connection.options import Options
from ..errors import AccessDenied, ReplicaError, ServerError, ServerNotReady, UrlError, translate
from ..store.calls.caller import DEFAULT_PARTITION_SIZE

logger = get_logger(__name__)

OLDEST = (6, 2)

#: Commands that scripts call with a key to remove something. A user who may use none of these loses
#: nothing if a script fails half way.
REMOVES = (
    *("DEL", "HDEL", "LREM", "RENAME", "RPOP", "UNLINK", "ZREM"),
    *("ZREMRANGEBYRANK", "ZREMRANGEBYSCORE"),
)

#: Other commands that scripts call with a key.
OTHERS = (
    *("EXISTS", "EXPIRE", "GET", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET"),
    *("HRANDFIELD", "HSCAN", "HSET", "HSETNX", "HVALS", "INCR", "LINDEX", "LLEN", "LPUSH"),
    *("LRANGE", "LSET", "MGET", "PERSIST", "PEXPIRE", "PTTL", "RPUSH", "SET", "XADD", "XRANGE"),
    *("ZADD", "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE"),
    *("ZREVRANGEBYSCORE", "ZSCAN", "ZSCORE"),
)

#: Returns which commands the user may not use with a key. Redis before version 7 cannot say so.
_ASK_RIGHTS = """
local denied = {}
for i = 2, redis.acl_check_cmd and #ARGV or 0 do
  local command, key = ARGV[i], ARGV[1]
  if not redis.acl_check_cmd(command, key, key, key) then denied[#denied + 1] = command end
end
return denied
"""

#: Whether a server was not ready, so that the next one that is checked has to accept a write, too.
_is_in_doubt = False

#: The partition sizes that suit the servers this process has checked, by address.
_partition_sizes: dict[Hashable, int] = {}


@dataclass(frozen=True)
class Server:
    """The properties of a server: version, eviction policy, role, compact size of a sorted set.

    `stops_with_others`: a node of a Cluster that refuses all commands while a slot has no node.
    `mode` is "standalone", "cluster" or "sentinel".
    """

    version: str
    eviction: str
    read_only_replica: bool
    may_run_scripts: bool
    persistent: bool
    partition_size: int
    ahead_seconds: float = 0.0
    stops_with_others: bool = False
    mode: str = "standalone"
    #: The version of its data, if it has one.
    format: bytes | None = None
    #: Why it runs no scripts for any user; a Sentinel runs none either.
    without_scripts: ServerError | None = None
    #: Commands of scripts that the user may not use; empty if the user may remove nothing.
    denied: tuple[str, ...] = ()


def inspect(client: Redis, format_key: str = "") -> Server:
    """Ask the server, in one round trip. Raises redis-py's connection errors."""
    answers = _ask(client, format_key)
    general, memory, replication, persistence, _, sizes, save, _, whole = map(
        _settings, answers[:9]
    )
    mode = str(general.get("redis_mode") or general.get("server_mode") or "standalone")
    saves = bool(save.get("save")) or persistence.get("aof_enabled") != 0
    return Server(
        version=str(general.get("redis_version", "")),
        eviction=str(memory.get("maxmemory_policy", "noeviction")),
        read_only_replica=replication.get("role") == "slave"
        and str(replication.get("slave_read_only", "1")) == "1",
        may_run_scripts=not isinstance(answers[4], NoPermissionError),
        persistent=saves or isinstance(answers[6], ResponseError),
        partition_size=_compact_size(sizes),
        ahead_seconds=_ahead_seconds(answers[7]),
        stops_with_others=mode == "cluster" and whole.get("cluster-require-full-coverage") == "yes",
        mode=mode,
        format=next((each for each in answers[10:] if isinstance(each, bytes)), None),
        without_scripts=_why_without_scripts(answers[9], answers[4]),  # of EVALSHA and of EVAL
        denied=_denied(answers[4]),
    )


def _ask(client: Redis, format_key: str) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("INFO", "server")
        pipeline.execute_command("INFO", "memory")
        pipeline.execute_command("INFO", "replication")
        pipeline.execute_command("INFO", "persistence")
        commands = (*REMOVES, *OTHERS) if format_key else ()
        pipeline.execute_command("EVAL", _ASK_RIGHTS, 0, format_key, *commands)
        pipeline.config_get("*-max-*")
        pipeline.config_get("save")
        pipeline.execute_command("TIME")
        pipeline.config_get("cluster-require-full-coverage")
        pipeline.execute_command("EVALSHA", "0" * 40, 0)
        if format_key:
            pipeline.execute_command("GET", format_key)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, (RedisConnectionError, RedisTimeoutError)):
            raise answer
    return answers


def _denied(answer: Any) -> tuple[str, ...]:
    found = {each.decode() for each in answer} if isinstance(answer, list) else set[str]()
    return () if found.issuperset(REMOVES) else tuple(sorted(found))


def _why_without_scripts(*answers: Any) -> ServerError | None:
    found = None
    for answer in answers:
        if isinstance(answer, ResponseError) and not isinstance(answer, NoPermissionError):
            meaning = translate(answer)
            if isinstance(meaning, RedisConnectionError):
                raise meaning
            if isinstance(meaning, ServerError):
                found = meaning
    return found


def _ahead_seconds(server_time: Any) -> float:
    if not isinstance(server_time, (tuple, list)):
        return 0.0
    seconds, microseconds = server_time
    return int(seconds) + int(microseconds) / 1e6 - time()


def _settings(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}


def _compact_size(sizes: dict[str, Any]) -> int:
    found = sizes.get("zset-max-listpack-entries") or sizes.get("zset-max-ziplist-entries")
    return max(int(found or DEFAULT_PARTITION_SIZE), 2)


def check(
    server: Server,
    *,
    mode: str = "",
    unsafe_server: bool = False,
    clock_skew_warning_seconds: float = 0,
) -> None:
    """Refuse a server that would lose messages, and log the `worries`. Raises as `refuse`."""
    refuse(server, mode, unsafe_server)
    for text in worries(server, clock_skew_warning_seconds):
        logger.warning("%s", text)


def refuse(server: Server, mode: str = "", unsafe_server: bool = False) -> None:
    """Refuse a server that would lose messages.

    Raises UrlError if a `mode` is given and the server has another one, ServerError, or
    ReplicaError (a connection error: a failover may be under way).
    """
    _check_mode(server.mode, mode)
    if server.without_scripts is not None:
        raise server.without_scripts
    _check_version(server.version)
    if server.format is not None:
        format.check(server.format)
    if not server.may_run_scripts:
        raise ServerError(
            "the user of the broker URL may not run Lua scripts; allow it with "
            "ACL SETUSER <user> +@scripting"
        )
    if server.denied:
        raise AccessDenied(
            f"the user of the broker URL may not use {', '.join(server.denied)}. Scripts that call "
            "this would fail half way, and lose messages: allow it with ACL SETUSER <user> "
            "+@read +@write"
        )
    if server.read_only_replica:
        raise ReplicaError(
            "the server is a read-only replica; the broker URL has to name its master"
        )
    if server.eviction.startswith("allkeys") and not unsafe_server:
        raise ServerError(
            f"the server's maxmemory-policy is {server.eviction}: when it is full it drops queues "
            "and delayed messages. Set maxmemory-policy noeviction, or accept the loss with the "
            "transport option delayed_unsafe_server=True"
        )


#: The keys with an expiry that matter; the others are listed in docs/operations.md.
_EVICTED = " of queues with an expiry, and lifecycle events"


def worries(server: Server, clock_skew_seconds: float) -> Iterator[str]:
    """Warnings about a server that is not refused. With a skew of 0 any skew is allowed."""
    if server.eviction != "noeviction":
        evicted = "" if server.eviction.startswith("allkeys") else _EVICTED
        yield (
            f"The server's maxmemory-policy is {server.eviction}: when it is full it drops "
            f"messages{evicted}. Set maxmemory-policy noeviction."
        )
    if clock_skew_seconds and abs(server.ahead_seconds) > clock_skew_seconds:
        is_ahead = server.ahead_seconds > 0
        yield (
            f"The server's clock is {abs(server.ahead_seconds):.0f} seconds "
            f"{'ahead of' if is_ahead else 'behind'} this machine's: tasks sent from here with a "
            f"countdown are due that much {'earlier' if is_ahead else 'later'}. Synchronise the "
            "clocks (NTP)."
        )
    if not server.persistent:
        yield (
            "The server keeps nothing on disk: a restart loses every delayed message. "
            "Set appendonly yes."
        )
    if server.stops_with_others:
        yield (
            "A node of the Cluster has cluster-require-full-coverage yes: with one node down for "
            "good all queues stop. Set cluster-require-full-coverage no."
        )


def looked_at(client: Redis, mode: str, options: Options, format_key: str) -> Server:
    """Inspect and check a server. Raises what `inspect` and `check` raise."""
    found = inspect(client, format_key)
    check(
        found,
        mode=mode,
        unsafe_server=options.unsafe_server,
        clock_skew_warning_seconds=options.clock_skew_warning_seconds,
    )
    return found


def partition_size(server: Hashable, client: Redis, options: Options, format_key: str) -> int:
    """The partition size that suits a single server or a master, which is checked once."""
    global _is_in_doubt
    if server not in _partition_sizes:
        if _is_in_doubt:
            check_that_it_writes(client, format_key)
            _is_in_doubt = False
        found = looked_at(client, "standalone", options, format_key)
        _partition_sizes[server] = found.partition_size
    return _partition_sizes[server]


def look_again() -> None:
    """Have each server checked before it is used again, because one was not ready."""
    global _is_in_doubt
    _partition_sizes.clear()
    _is_in_doubt = True


def check_that_it_writes(client: Redis, format_key: str) -> None:
    """Raise ServerNotReady if the server refuses writes, as a master without enough replicas.

    It answers everything else, so anyone who connected would be refused again without a pause.
    """
    try:
        client.execute_command("UNLINK", f"{format_key}:absent")
    except ResponseError as error:
        if isinstance(meaning := translate(error), ServerNotReady):
            raise meaning from error


#: The fault of a broker URL, by the mode of its server, and which URL to use.
_URLS = {
    "standalone": "it is a single server: use a URL that begins with delayed+redis://",
    "cluster": "it is a node of a Redis Cluster: use a URL that begins with delayed+rediscluster://",
    "sentinel": "it is a Sentinel: use a URL that begins with delayed+sentinel://, and the "
    "transport option master_name",
}


def _check_mode(mode: str, expected: str) -> None:
    if expected and mode != expected and mode in _URLS:
        raise UrlError(f"the broker URL does not fit the server that it leads to; {_URLS[mode]}")


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, without parts that are not numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _check_version(version: str) -> None:
    numbers = numbers_of(version)
    if numbers and numbers < OLDEST:
        raise ServerError(
            f"the server is Redis {version}; delayed messages need Redis 6.2 or Valkey 8"
        )
