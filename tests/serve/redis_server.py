"""A real Redis or Valkey for tests, on a free port, that can be killed and started again."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from waiting import wait_until

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A server that keeps every write in a file of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        """Start it with what its folder holds."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--appendonly", "yes"]
        self.process = subprocess.Popen([PROGRAM, *options, "--save", ""], stdout=subprocess.DEVNULL)
        wait_until(self.answers)

    def answers(self) -> bool:
        """Whether it answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        except OSError:
            return False

    def kill(self, forget: bool = False) -> None:
        """End it at once; what it has written is lost too if it is to forget."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if forget:
            shutil.rmtree(self.folder)
            self.folder.mkdir()


def running_server(folder: Path) -> RedisServer:
    """A server, or a skipped test where none is installed."""
    if PROGRAM is None:
        pytest.skip("no redis-server and no valkey-server: apt-get install redis-server runs these tests")
    folder.mkdir(exist_ok=True)
    return RedisServer(folder)
