"""Sockets: they are bound at the start for early errors, and listen when the server is ready."""

import asyncio
import errno
import http.client
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys

import pytest

from benchmarks.shared.server_process import ROOT, ServerProcess
from jpaged.serving import listen
from jpaged.serving.listen import bind, bound_unix, limit_accept_reports, url
from tests.support.patience import PATIENCE_S, until


def connects(address) -> bool:
    with socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX) as client:
        return client.connect_ex(address) == 0


def test_bind_refuses_clients_until_the_socket_listens():
    (bound,) = bind("127.0.0.1", 0)
    with bound:
        assert bound.getsockname()[1] > 0 and not connects(bound.getsockname())
        bound.listen()
        assert connects(bound.getsockname())


def test_bind_to_a_port_that_another_has_bound_is_an_error_before_either_listens():
    (first,) = bind("127.0.0.1", 0)
    with first, pytest.raises(OSError, match="address already in use"):
        bind(*first.getsockname())


def test_bind_takes_a_port_that_only_ended_connections_hold():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client, server.accept()[0] as accepted:
            accepted.close()  # the server's side closes first, and so waits for late packets
            assert client.recv(1) == b""
    (again,) = bind(*address)
    again.close()


def test_bind_takes_every_address_of_a_name(monkeypatch):
    hosts = ["127.0.0.1", "127.0.0.2"]
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    found = bind("twice.example.org", 0)
    assert sorted(each.getsockname()[0] for each in found) == hosts
    for each in found:
        each.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_bind_to_ipv6_has_brackets_in_its_url():
    try:
        (bound,) = bind("::1", 0)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with bound:
        assert url(bound, "https") == f"https://[::1]:{bound.getsockname()[1]}"


def test_unix_socket_replaces_an_unused_one_and_is_removed_at_the_end(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bound_unix(path) as bound:
        assert not connects(str(path))
        bound.listen()
        assert connects(str(path)) and url(bound, "http") == f"http+unix:{path}"
        with pytest.raises(OSError, match="in use"), bound_unix(path):
            pass
        assert connects(str(path))
    assert not path.exists()


def test_unix_socket_replaces_no_other_file_and_no_later_socket(tmp_path):
    path = tmp_path / "socket"
    path.write_text("a file")
    with pytest.raises(OSError, match="in use"), bound_unix(path):
        pass
    assert path.read_text() == "a file"
    path.unlink()
    with bound_unix(path):
        os.replace(path, tmp_path / "moved")
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_server_on_a_unix_socket_writes_its_access_log_at_level_warning(tmp_path):
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "tests.serving.scripted", "--uds", str(path), "--log-level", "warning"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: connects(str(path)) or process.poll() is not None)
        connection = http.client.HTTPConnection("any.name.example.org")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGTERM)
        (line,) = process.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert process.returncode == 0 and not path.exists()
    assert '"path": "/v1/models", "status": 200' in line  # The level does not apply to the access log.


async def test_a_socket_that_is_closed_before_the_next_attempt_is_not_reported(caplog, monkeypatch):
    loop, accepted = asyncio.get_running_loop(), asyncio.Event()
    before = loop.get_exception_handler()
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    limit_accept_reports(loop)

    class Short(socket.socket):
        def accept(self):
            accepted.set()
            raise OSError(errno.ENFILE, "Too many open files in system")

    with Short() as short, socket.socket() as client:
        short.bind(("127.0.0.1", 0))
        server = await loop.create_server(asyncio.Protocol, sock=short)
        client.connect(short.getsockname())
        await accepted.wait()
        server.close()
    await asyncio.sleep(0.1)
    loop.set_exception_handler(before)
    assert caplog.messages == ["new connections wait until others end: [Errno 23] Too many open files in system"]


async def test_reports_of_connections_that_wait_are_few_and_all_others_are_kept(caplog, monkeypatch):
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    limit_accept_reports(loop)
    shortage = {"message": "no accept", "exception": OSError(errno.EMFILE, "Too many open files"), "socket": None}
    defect = {"message": "a callback failed", "exception": ZeroDivisionError("defect")}
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(1000):
                loop.call_exception_handler(shortage)
            assert caplog.messages == ["new connections wait until others end: [Errno 24] Too many open files"]
            monkeypatch.setattr(listen, "REPORT_INTERVAL_S", 0.0)
            for context in (shortage, defect, defect, shortage | {"exception": OSError(errno.EBADF, "Bad file")}):
                loop.call_exception_handler(context)
    finally:
        loop.set_exception_handler(before)
    assert [message.partition("\n")[0] for message in caplog.messages[2:]] == [defect["message"]] * 2 + ["no accept"]
    assert caplog.records[2].exc_info[1] is defect["exception"]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_a_server_without_free_files_says_so_once_and_recovers():
    with ServerProcess(module="tests.serving.scripted") as server:
        pid, address = server.process.pid, ("127.0.0.1", server.port)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # below what it has open
        clients = [socket.create_connection(address) for _ in range(3)]
        waiting = "WARNING jpaged.serving.listen: new connections wait until others end"
        server.wait_for_log(waiting)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for client in clients:
            client.close()
        connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        assert len(re.findall(waiting, server.log())) == 1 and "system resource" not in server.log()
