"""Serves the web page of a running job, and its metrics for Prometheus, to clients on this machine only.

The server is a process of its own that reads what the ranks have recorded, so a slow browser delays neither
the ranks nor the launcher. It answers only requests with the token, and only under the names of this machine,
so that no other web page can read it through the user's browser.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from paceline.errors import ConfigError
from paceline.monitor.history import History
from paceline.monitor.metrics import CONTENT_TYPE, metrics_text
from paceline.monitor.snapshot import JobSnapshot
from paceline.monitor.watch import JobWatch, as_plain, plain

_PAGE = Path(__file__).with_name("dashboard.html")
_EVERY_S = 1.0
_MOST_CONNECTIONS = 32  # with the token, and as many without it
_SLOWEST_S = 10.0  # for a browser to accept data, and for a connection without the token to stay open
_OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")


@final
class Feed:
    """Keeps the newest snapshot of the job and its history; wakes the threads that wait for a new one."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._history = History()
        self._changed = threading.Condition()
        self._number = 0  # of the last snapshot
        self._reshaped = 0  # number of the last snapshot that made the history merge its points
        self._now: JobSnapshot | None = None
        self._exit_status: int | None = None
        self._has_ended = False
        self._trouble = ""

    def look(self) -> None:
        try:
            now = self._watch.look()
        except ConfigError as error:
            self._report_trouble(str(error).splitlines()[0])
            return
        gone = f"The recording is gone: {self._watch.folder} was removed while the job runs."
        self._report_trouble(gone if self._watch.is_gone else "")
        with self._changed:
            self._number += 1
            if self._history.add(now, time.time()):
                self._reshaped = self._number
            self._now = now
            self._changed.notify_all()

    def _report_trouble(self, trouble: str) -> None:
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()

    def end(self, exit_status: int | None) -> None:
        with self._changed:
            self._exit_status, self._has_ended = exit_status, True
            self._changed.notify_all()

    def metrics(self) -> str:
        with self._changed:
            now = self._now
        return "" if now is None else metrics_text(now, self._watch.id)

    def next_event(self, seen: int) -> tuple[int, str, dict[str, Any]]:
        """The next event to send to a browser; blocks until there is one, for at most 5 seconds.

        Returns:
            The number of the event, its name and its data. The name is "all" for the whole history, "now"
            for what is new, "ended" when the job has ended, "trouble" for the reason why nothing is known,
            and "wait" if there was nothing new.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._number > seen or self._has_ended or self._trouble, timeout=5 * _EVERY_S
            )
            if self._trouble and not self._has_ended:
                return seen, "trouble", {"text": self._trouble}
            if self._now is None or self._number <= seen:
                return seen, "ended" if self._has_ended else "wait", {"exit_status": self._exit_status}
            history, number = self._history, self._number
            # "now" carries one point: a browser that may lack more than one gets the whole history.
            is_whole = not seen or self._reshaped > seen or number > seen + history.num_per_point
            reported = {
                "job": as_plain(self._watch, self._now),
                "points": [
                    plain(asdict(each)) for each in (history.points if is_whole else history.points[-1:])
                ],
                "incidents": [plain(asdict(each)) for each in history.incidents],
            }
        return number, "all" if is_whole else "now", reported


class Dashboard(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, feed: Feed, token: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.feed, self.token = feed, token
        self._admission = threading.Lock()
        # When each connection began: first those without the token, then those with it; oldest first.
        self._unknown_peers: dict[Any, float] = {}
        self._known: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the newest connection. If there are too many, close the oldest one without the token."""
        with self._admission:
            self._make_room(self._unknown_peers)
            self._unknown_peers[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._admission:
                self._unknown_peers.pop(request, None)
                self._known.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that are too old without the token; called several times a second."""
        with self._admission:
            for request, since_s in list(self._unknown_peers.items()):
                if time.monotonic() - since_s > _SLOWEST_S:
                    self._drop(self._unknown_peers, request)

    def trust(self, request: Any) -> None:
        """Note that a connection has shown the token."""
        with self._admission:
            if self._unknown_peers.pop(request, None) is not None:
                self._make_room(self._known)
                self._known[request] = time.monotonic()

    def _make_room(self, connections: dict[Any, float]) -> None:
        if len(connections) >= _MOST_CONNECTIONS:
            self._drop(connections, next(iter(connections)))

    @staticmethod
    def _drop(connections: dict[Any, float], request: Any) -> None:
        """Shut a connection down; the thread that serves it then finds it closed."""
        del connections[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    server_version, sys_version = "Paceline", ""
    protocol_version = "HTTP/1.1"
    timeout = _SLOWEST_S

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if not self._is_for_us():
            self._refuse("This page is served under the names of this machine only.")
        elif not self._knows_token(address.query):
            self._refuse("The address needs its token: `paceline run` has printed it.")
        else:
            self.server.trust(self.connection)
            self._answer(address.path)

    def _answer(self, path: str) -> None:
        if path == "/":
            self._send_page()
        elif path == "/events":
            self._send_events()
        elif path == "/metrics":
            self._send(200, CONTENT_TYPE, self.server.feed.metrics().encode())
        else:
            self._say(404, "There is only /, /events and /metrics.")

    def _is_for_us(self) -> bool:
        """Whether the request names this machine. Another name may resolve to it, too (DNS rebinding)."""
        named = self.headers.get_all("Host") or [""]
        host, _, port = named[0].rpartition(":")
        return len(named) == 1 and (host if port.isdigit() and host else named[0]) in _OWN_NAMES

    def _knows_token(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        bearer = self.headers.get("Authorization", "")
        if bearer.startswith("Bearer "):
            given = bearer.removeprefix("Bearer ").strip()
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = _PAGE.read_text().replace("{nonce}", nonce)
        self._send(200, "text/html; charset=utf-8", page.encode(), {"Content-Security-Policy": policy})

    def _send_events(self) -> None:
        self.close_connection = True
        self._send_head(200, "text/event-stream", {"Connection": "close"})
        seen, name = 0, ""
        while name != "ended":
            seen, name, data = self.server.feed.next_event(seen)
            self.wfile.write(f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode())
            if name == "trouble":
                time.sleep(_EVERY_S)

    def _refuse(self, text: str) -> None:
        """Refuse, and close the connection, because further requests on it would keep this process busy."""
        self.close_connection = True
        self._send(403, "text/plain; charset=utf-8", text.encode() + b"\n", {"Connection": "close"})

    def _say(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode() + b"\n")

    def _send(self, status: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self._send_head(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def _send_head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def serve() -> None:
    """Serve a job's page. This is the main function of a process that the launcher starts.

    The first line of standard input is JSON: the folder in which the ranks record, the descriptor of a
    listening socket, and the token. The second line is JSON with the exit status of the job. The server ends
    after that line, or when standard input is closed.
    """
    order = json.loads(sys.stdin.readline())
    with contextlib.suppress(OSError):
        os.nice(10)  # the ranks have priority
    feed = Feed(JobWatch(Path(order["folder"])))
    server = Dashboard(socket.socket(fileno=order["fd"]), feed, order["token"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    is_over = threading.Event()
    threading.Thread(target=_look_on, args=(feed, is_over), daemon=True).start()
    last = sys.stdin.readline()
    is_over.set()
    feed.look()
    feed.end(json.loads(last)["exit_status"] if last else None)
    time.sleep(0.2)  # for the last event to reach browsers; daemon threads end with this process


def _look_on(feed: Feed, is_over: threading.Event) -> None:
    while True:
        feed.look()
        if is_over.wait(_EVERY_S):
            return
