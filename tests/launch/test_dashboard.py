"""`paceline run --dashboard`: the page exists as long as the job, which runs on if it cannot be served."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.launch.conftest import WITHIN_S, Launcher
from tests.launch.test_top import RECORDS


def address_of(job: subprocess.Popen[str]) -> str:
    assert job.stderr is not None
    found = re.fullmatch(
        r"paceline: the dashboard is at (http://127\.0\.0\.1:\d+/\?token=\S{24,})\n", job.stderr.readline()
    )
    assert found
    return found[1]


def test_the_page_shows_the_job_until_it_ends(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "--dashboard", "script.py", script=RECORDS)
    address = address_of(job)
    with urllib.request.urlopen(address, timeout=WITHIN_S) as page:
        assert b"<title>Paceline</title>" in page.read()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address[:-1], timeout=WITHIN_S)
    events = urllib.request.urlopen(address.replace("/?", "/events?"), timeout=WITHIN_S)
    lines = (line.decode() for line in events)
    for line in lines:
        if line.startswith("data: "):
            shown = json.loads(line[6:]).get("job", {"ranks": []})
            if len(shown["ranks"]) == 2 and all(each["step"] and each["values"] for each in shown["ranks"]):
                break
    assert shown["name"] == "script.py" and shown["ranks"][1]["values"] == {"loss": 0.5}
    (launcher.folder / "stop").touch()
    assert 'event: ended\ndata: {"exit_status": 0}\n' in "".join(lines)
    events.close()
    stdout, stderr = job.communicate(timeout=WITHIN_S)
    assert (job.returncode, stdout, stderr) == (0, "", "")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=WITHIN_S)


def test_a_port_in_use_is_reported_and_the_job_goes_on(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launcher.run("-n", "2", f"--dashboard={port}", "script.py", script="print('trained')")
    assert (done.returncode, done.stdout.count("trained")) == (0, 2)
    assert done.stderr == (
        f"paceline: there is no dashboard on port {port}: Address already in use. "
        "The job goes on without; --dashboard alone takes a free port\n"
    )
