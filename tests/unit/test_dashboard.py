"""The page of a running job: the right to read it, its events, its history, and figures for Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.launch.dashboard_process import TOKEN_VARIABLE, check_dashboard
from paceline.monitor import dashboard
from paceline.monitor.dashboard import Dashboard, Feed
from paceline.monitor.history import MOST_POINTS, History
from paceline.monitor.metrics import metrics_text
from paceline.monitor.snapshot import RankWindow, snapshot
from paceline.monitor.watch import JobWatch
from paceline.trace.recording import Recording
from paceline.trace.records import Event, Record, backward_id, float_bits
from paceline.trace.ring_file import RankHeader, path_of
from tests.browser import PROGRAM, Browser

TOKEN = "0123456789abcdef"
MS = 1_000_000
WHO = frozenset({("job_id", "07ad56"), ("rank", "0"), ("host", "host")})


def window(rank: int = 0, passes: int = 3, pid: int = 1, **more: object) -> RankWindow:
    records = []
    for number in range(1, passes + 1):
        key = backward_id(0, number)
        records += [
            Record(number * 100 * MS, Event.BACKWARD_ENDED, 0, key, 0),
            Record((number * 100 + 40 * rank) * MS, Event.WAITED, 0, number * 100 * MS, 1 - rank),
            Record((number * 100 + 50) * MS, Event.AVERAGING_ENDED, 0, key, 0),
        ]
    return RankWindow(RankHeader(rank, 2, pid, "host", "boot", 0, 0, 64), records, **more)  # type: ignore


# --- history ---


def test_a_long_job_has_as_many_points_as_a_short_one():
    history = History()
    now = snapshot([window(0), window(1)], 350 * MS)
    reshaped = [number for number in range(1, 4 * MOST_POINTS) if history.add(now, float(number))]
    assert reshaped == [MOST_POINTS + 1, 2 * MOST_POINTS + 1]
    assert MOST_POINTS / 2 <= len(history.points) <= MOST_POINTS
    assert history.num_per_point == 4
    times = [point.time_s for point in history.points]
    assert times == sorted(times) and times[-1] >= 4 * MOST_POINTS - 4
    assert history.points[0].waited_for == pytest.approx(now.waited_for)
    assert history.points[7].steps_per_s == pytest.approx(now.steps_per_s)


def test_faults_recoveries_restarts_and_ends_are_reported_once():
    history = History()
    failure = [(1000 * MS, "PeerLostError: Rank 1 of 2 died.\n  where ...")]
    for number, each in enumerate(
        (
            window(passes=5),
            window(passes=5, failures=failure),
            window(passes=5, failures=failure),
            window(passes=15, failures=failure),
            window(passes=15, failures=failure),
            window(passes=1, pid=2),
            window(passes=1, pid=2, is_alive=False),
        )
    ):
        history.add(snapshot([each], 2000 * MS), float(number))
    assert [(each.time_s, each.kind, each.text) for each in history.incidents] == [
        (1.0, "fault", "PeerLostError: Rank 1 of 2 died."),
        (3.0, "recovery", "went on with step 15"),
        (5.0, "restart", "began again as process 2"),
        (6.0, "end", "process 2 has ended"),
    ]


# --- Prometheus ---

METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|Inf)|NaN", re.I)


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By the specification of the text format, version 0.0.4; any other line fails."""
    assert text.endswith("\n")
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    kinds: dict[str, str] = {}
    current = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
            continue
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in kinds and kind in ("counter", "gauge")
            kinds[current] = kind
            continue
        match = METRIC.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        assert name == current, "samples of a metric stand together, below its type"
        assert "".join(each.group() for each in LABEL.finditer(labels)) == labels
        assert NUMBER.fullmatch(value)
        unescaped = {
            key: re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), given)
            for key, given in LABEL.findall(labels)
        }
        key = name, frozenset(unescaped.items())
        assert key not in found
        found[key] = float(value)
    return found


@given(st.text(), st.floats())
def test_prometheus_reads_what_was_logged(name: str, value: float):
    records = [*window().records, Record(999 * MS, Event.LOGGED, 0, 0, float_bits(value))]
    now = snapshot([RankWindow(window().header, records, {0: name})], 1000 * MS)
    found = parsed(metrics_text(now, "07ad56"))
    value = found["paceline_logged_value", WHO | {("name", name)}]
    assert value == value or (math.isnan(value) and math.isnan(value))


def test_prometheus_gets_the_figures_of_each_rank():
    now = snapshot([window(0), window(1, is_alive=False)], 350 * MS)
    found = parsed(metrics_text(now, "x"))

    def of(name: str, rank: int) -> float:
        return found[f"paceline_{name}", frozenset({("job_id", "x"), ("rank", str(rank)), ("host", "host")})]

    assert (of("up", 0), of("up", 1), of("steps_total", 0)) == (1, 0, 3)
    assert of("waiting_ratio", 1) == now.ranks[1].waiting > 0
    assert of("waited_for_ratio", 0) == now.waited_for[0] > 0
    assert not any(name == "paceline_gradient_norm" for name, _ in found)


# --- the server ---


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[int, Feed, Recording]]:
    """A job of this process alone, and its page's port."""
    ring = Recording()
    ring.start(path_of(tmp_path, 0), 0, 1, 4096)
    for number in range(1, 20):
        ring.note(Event.FORWARD_BEGAN, backward_id(0, number), 8 << 1 | 1)
        ring.note(Event.BACKWARD_ENDED, backward_id(0, number), 0)
        ring.note(Event.AVERAGING_ENDED, backward_id(0, number), 0)
    ring.note(Event.LOGGED, ring.number_name('<b>"loss"</b>'), float_bits(0.25))
    ring.note(Event.NORM, backward_id(0, 19), float_bits(1.5))
    ring.note(Event.NONFINITE, backward_id(0, 19), 2 << 32)
    ring.note_failure(ValueError("<script>boom</script>"))
    feed = Feed(JobWatch(tmp_path))
    feed.look()
    server = Dashboard(socket.create_server(("127.0.0.1", 0)), feed, TOKEN)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1], feed, ring
    feed.end(0)
    server.shutdown()
    server.server_close()
    thread.join()
    ring._stop()


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer


def test_only_who_knows_the_token_reads_anything(page):
    port, _, _ = page
    for path in ("/", "/events", "/metrics", "/none"):
        for query in ("", "?token=", "?token=0123456789abcdeX", "?token=" + TOKEN[:-1], "?other=" + TOKEN):
            status, text, _ = ask(port, path + query)
            assert status == 403 and "token" in text and TOKEN not in text
    status, text, answer = ask(port, f"/?token={TOKEN}")
    assert status == 200 and "<title>Paceline</title>" in text and TOKEN not in text
    assert (
        answer.headers["Cache-Control"] == "no-store" and answer.headers["Referrer-Policy"] == "no-referrer"
    )
    assert ask(port, f"/none?token={TOKEN}")[0] == 404
    assert ask(port, f"/?token={TOKEN}", method="POST")[0] == 501
    assert ask(port, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(port, "/metrics", Authorization="Bearer x")[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.2"]
)
def test_an_unknown_peers_name_for_this_machine_is_refused(page, host: str):
    status, text, _ = ask(page[0], f"/?token={TOKEN}", Host=host)
    assert status == 403 and "names of this machine" in text


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:2"])
def test_names_of_this_machine_are_served(page, host: str):
    """Also with another port, as through a tunnel of ssh."""
    assert ask(page[0], f"/?token={TOKEN}", Host=host)[0] == 200


def test_the_page_needs_nothing_from_elsewhere_and_may_load_nothing(page):
    _, text, answer = ask(page[0], f"/?token={TOKEN}")
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which is not resolved
    assert not re.search(r"<(link|img|iframe|script src)|@import|url\(", text)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
    assert f"'nonce-{nonce}'" in policy
    assert nonce not in ask(page[0], f"/?token={TOKEN}")[1]


def test_metrics_are_served_as_prometheus_asks(page):
    status, text, answer = ask(page[0], f"/metrics?token={TOKEN}")
    assert status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert len(parsed(text)) > 8


def events(port: int) -> Iterator[tuple[str, dict]]:
    """The events that a browser receives, by the specification of server-sent events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("GET", f"/events?token={TOKEN}")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/event-stream"
    while name := answer.readline().decode():
        data, end = answer.readline().decode(), answer.readline()
        assert name.startswith("event: ") and data.startswith("data: ") and end == b"\n"
        yield name[7:-1], json.loads(data[6:])
    connection.close()


def test_a_browser_receives_all_then_what_is_new_then_the_end(page):
    port, feed, _ = page
    stream = events(port)
    name, data = next(stream)
    assert (name, len(data["points"]), data["job"]["step"]) == ("all", 1, 19)
    assert {each["kind"] for each in data["incidents"]} == {"fault", "nonfinite"}
    feed.look()
    name, data = next(stream)
    assert (name, len(data["points"])) == ("now", 1)
    feed.end(3)
    assert list(stream) == [("ended", {"exit_status": 3})]


def test_connections_without_the_token_keep_no_reader_out(page):
    """Two for each permitted connection, which send a byte now and then."""
    port, feed, _ = page
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
    try:
        for _ in range(3):
            for each in slow:
                with contextlib.suppress(OSError):
                    each.send(b"G")
            assert ask(port, f"/?token={TOKEN}")[0] == 200
        stream = events(port)
        assert next(stream)[0] == "all"
        slow += [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
        assert ask(port, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        feed.look()
        # A connection that has shown the token is not closed for others. A busy machine may have had to
        # "wait".
        assert next(name for name, _ in stream if name != "wait") == "now"
    finally:
        for each in slow:
            each.close()


def test_a_connection_without_the_token_gets_one_answer(page):
    """However many requests it has sent: answering all of them would keep the page from others."""
    port, *_ = page
    with socket.create_connection(("127.0.0.1", port), timeout=240) as asking:
        asking.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answers = b""
        with contextlib.suppress(ConnectionResetError):  # because of unread data, and perhaps at once
            while piece := asking.recv(1 << 16):
                answers += piece
    assert answers.count(b"HTTP/1.1 403") <= 1


def test_who_asks_for_too_long_is_sent_away(page, monkeypatch):
    """However many bytes it sends meanwhile."""
    monkeypatch.setattr(dashboard, "_SLOWEST_S", 0.3)
    with socket.create_connection(("127.0.0.1", page[0]), timeout=240) as slow:
        slow.settimeout(0.02)
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while not is_closed(slow):
                slow.sendall(b"y")
    assert ask(page[0], f"/?token={TOKEN}")[0] == 200


def is_closed(connection: socket.socket) -> bool:
    """True if the other side has ended it, within the connection's time-out."""
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False


@pytest.mark.parametrize("path", ["/", "/events"])
def test_connections_that_read_no_answer_keep_no_reader_out(page, path: str):
    """Even with the token: the oldest is closed."""
    unread = []
    try:
        for _ in range(40):
            unread.append(socket.create_connection(("127.0.0.1", page[0]), timeout=240))
            unread[-1].sendall(f"GET {path}?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert unread[-1].recv(1, socket.MSG_PEEK) == b"H"  # it has been answered
        assert ask(page[0], f"/?token={TOKEN}")[0] == 200
    finally:
        for each in unread:
            each.close()


def test_a_recording_that_is_gone_is_reported(page, tmp_path):
    port, feed, _ = page
    stream = events(port)
    assert next(stream)[0] == "all"
    shutil.rmtree(tmp_path)
    feed.look()
    name, data = next(each for each in stream if each[0] != "now")
    assert name == "trouble" and data["text"].startswith(f"The recording is gone: {tmp_path} was removed")


def test_a_recording_that_is_damaged_is_reported(page, tmp_path):
    port, feed, _ = page
    path_of(tmp_path, 0).write_bytes(b"PACELINE" + struct.pack("<IIQ", 2, 32, 1 << 40).ljust(4096, b"\xff"))
    feed.look()
    name, data = next(events(port))
    assert name == "trouble" and data["text"].startswith("This recording is damaged: ")


@pytest.mark.parametrize("port", ["", "x", "65536", "-1", "1.5"])
def test_a_port_that_is_none_is_refused(port: str):
    with pytest.raises(ConfigError, match="is no port"):
        check_dashboard(port, {})


def test_tokens_are_random_or_the_users():
    assert check_dashboard("8080", {TOKEN_VARIABLE: TOKEN}) == (8080, TOKEN)
    tokens = {check_dashboard("0", {})[1] for _ in range(10)}
    assert len(tokens) == 10 and min(map(len, tokens)) >= 24
    for wrong in ("short", "with a space in it", "a/b/c/d/e/f/g/h/i"):
        with pytest.raises(ConfigError, match="is no token"):
            check_dashboard("0", {TOKEN_VARIABLE: wrong})


@pytest.mark.skipif(PROGRAM is None, reason="there is no chromium to look at the page with")
def test_a_real_browser_shows_the_job(page, tmp_path_factory):
    port, feed, ring = page
    browser = Browser(tmp_path_factory.mktemp("browser"))
    try:
        browser.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
        text = browser.until("document.querySelector('#ranks tr') && document.body.innerText")
        # Text that comes from the job is never interpreted as markup.
        assert '<b>"loss"</b>' in text and "ValueError: <script>boom</script>" in text
        assert browser.evaluate("document.querySelectorAll('main b b, main script').length") == 0
        assert "2 gradients were not finite, first on rank 0" in text
        ring.note(Event.AVERAGING_ENDED, backward_id(0, 1234), 0)
        feed.look()
        browser.until("document.querySelector('.figure').innerText.startsWith('1234')")
        browser.until("document.querySelectorAll('#norm path, #norm .mark').length >= 2")
        browser.evaluate("cause({slow_rank: 1, cause: 'it computed for <b>9 ms</b>'})")
        why = browser.evaluate("document.querySelector('#cause').innerText")
        assert why == "Rank 1 is slow: it computed for <b>9 ms</b>."
        looks = {}
        for width, scheme in ((1300, "light"), (400, "dark")):
            browser.open(f"http://127.0.0.1:{port}/?token={TOKEN}", width, scheme=scheme)
            browser.until("document.querySelector('#ranks tr') && true")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.screenshot().startswith(b"\x89PNG")
            looks[scheme] = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert looks["light"] == "rgb(255, 255, 255)" != looks["dark"]
        feed.end(7)
        browser.until("document.body.innerText.includes('the job has ended: exit status 7')")
        browser.open(f"http://127.0.0.1:{port}/")
        browser.until("document.body.innerText.includes('The address needs its token')")
    finally:
        browser.close()
