"""Measures the link between two hosts: tc may accept a rate that the processor cannot reach.

Run `python -m tests.hosts.link_speed receive` on one host, and then `... send ADDRESS` on the other.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from tests.hosts.namespaces import Hosts

_PORT = 29561
_SECONDS = 1.0
_MESSAGE_BYTES = 1 << 18


def carried_bits_per_s(hosts: Hosts) -> float:
    """Measure the rate of one connection from host 0 to host 1 for a second."""
    command = [sys.executable, "-m", "tests.hosts.link_speed"]
    receiver = hosts.start(1, [*command, "receive"], {}, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()  # "listening"
    sender = hosts.start(0, [*command, "send", hosts.address(1)], {})
    output, _ = receiver.communicate(timeout=60)
    sender.wait(60)
    return float(output)


def receive() -> None:
    """Print "listening", then the bits per second that arrive over one connection."""
    with socket.create_server(("", _PORT)) as listener:
        print("listening", flush=True)
        connection, _ = listener.accept()
        with connection:
            nbytes, room = connection.recv_into(bytearray(1)), bytearray(_MESSAGE_BYTES)
            started = time.perf_counter()
            while count := connection.recv_into(room):
                nbytes += count
            print(8 * nbytes / (time.perf_counter() - started))


def send(address: str) -> None:
    with socket.create_connection((address, _PORT), timeout=60) as connection:
        ends, message = time.perf_counter() + _SECONDS, bytes(_MESSAGE_BYTES)
        while time.perf_counter() < ends:
            connection.sendall(message)


if __name__ == "__main__":
    receive() if sys.argv[1] == "receive" else send(sys.argv[2])
