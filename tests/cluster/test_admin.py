"""What masters say over HTTP, told by one that says what a test wants."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from workmem.cluster import hosting
from workmem.cluster.admin import Admin, AdminError, DrainResult
from workmem.cluster.config import ClusterConfig
from workmem.cluster.hosting import Hosting
from workmem.cluster.view import look
from workmem.core.errors import TransferError

SERVING = {"role": "leader", "ha_state": "serving", "service_ready": True, "leader_address": None, "new": 1}
METRICS = """# TYPE master_key_count gauge
master_key_count 4
master_total_capacity_bytes 1.34217728e+08
segment_allocated_bytes{segment="a:1"} 7
master_mount_segment_requests_total 2
master_remount_segment_requests_total 5
"""


class Spoken:
    """A master that answers from a table: path without query -> what to say, or a list of it, in turn."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.answers: dict[str, object] = {"/health": SERVING, "/metrics": METRICS}
        spoken = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                spoken.asked.append((self.command, self.path, body))
                said = spoken.answers.get(self.path.split("?")[0])
                if isinstance(said, list):
                    said = said.pop(0) if len(said) > 1 else said[0]
                text = said if isinstance(said, str) else json.dumps(said)
                self.send_response(500 if said is None else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *args) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def segments(self, **states: str) -> None:
        found = [{"segment_name": name, "status": state, "size_bytes": 1} for name, state in states.items()]
        self.answers["/get_segments_detail"] = {"total_segments": len(found), "segments": found}

    def job(self, *states: dict) -> None:
        self.answers["/api/v1/drain_jobs"] = {"success": True, "job_id": "7-8", "status": "CREATED"}
        self.answers["/api/v1/drain_jobs/query"] = list(states)
        self.answers["/api/v1/drain_jobs/cancel"] = {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def master():
    made = Spoken()
    made.segments(mine="OK", other="OK", leaving="DRAINING")
    yield made
    made.close()


def test_a_pool_is_read(master):
    found = look([master.url + "/", "http://127.0.0.1:1"])
    assert [(one.answers, one.serves, one.role) for one in found.masters] == [
        (True, True, "leader"),
        (False, False, ""),
    ]
    assert "no answer from http://127.0.0.1:1" in found.masters[1].problem
    assert [one.segment_name for one in found.segments] == ["leaving", "mine", "other"]
    assert (found.pool.keys, found.pool.capacity_bytes, found.pool.came_back) == (4, 128 * 2**20, 3)


def test_one_that_stands_by_is_not_asked_for_the_pool(master):
    master.answers["/health"] = {**SERVING, "role": "standby", "ha_state": "standby", "service_ready": False}
    found = look([master.url])
    assert found.pool is None
    assert found.masters[0].state == "standby"
    assert [path for _, path, _ in master.asked] == ["/health"]


@pytest.mark.parametrize("said", ["no JSON", '{"segments": 3}', '{"segments": [{}]}', None])
def test_what_cannot_be_read_is_an_answer_and_no_traceback(master, said):
    master.answers["/get_segments_detail"] = said
    with pytest.raises(AdminError, match=master.url):
        Admin(master.url).segments()
    (found,) = look([master.url]).masters
    assert not found.answers
    assert "/get_segments_detail answers" in found.problem


def test_pages_are_moved_to_all_that_are_well(master):
    master.job(
        {"status": 2, "status_name": "RUNNING"},
        {"status": 3, "status_name": "SUCCEEDED", "succeeded_units": 5},
    )
    done = Admin(master.url).drain("mine", 20)
    assert (done.result, done.moved, done.stayed) == (DrainResult.DONE, 5, 0)
    method, _, body = next(asked for asked in master.asked if asked[1] == "/api/v1/drain_jobs")
    assert method == "POST"
    assert json.loads(body)["segments"] == ["mine"]
    assert json.loads(body)["target_segments"] == ["other"]
    assert ("GET", "/api/v1/drain_jobs/query?job_id=7-8", "") in master.asked


def test_pages_that_stay_are_told(master):
    master.job({"status_name": "SUCCEEDED", "succeeded_units": 5, "failed_units": 2, "message": "no room"})
    done = Admin(master.url).drain("mine", 20)
    assert (done.result, done.moved, done.stayed, done.message) == (DrainResult.PARTLY, 5, 2, "no room")


def test_moving_that_does_not_end_is_given_up(master):
    master.job({"status_name": "RUNNING", "succeeded_units": 5, "blocked_units": 1})
    done = Admin(master.url).drain("mine", 0.05)
    assert (done.result, done.moved, done.stayed) == (DrainResult.LATE, 5, 1)
    assert master.asked[-1][:2] == ("POST", "/api/v1/drain_jobs/cancel?job_id=7-8")


def test_the_last_host_has_nowhere_to_move_pages_to(master):
    master.segments(mine="OK", leaving="DRAINING")
    assert Admin(master.url).drain("mine", 20).result is DrainResult.NOWHERE
    assert [path for _, path, _ in master.asked] == ["/get_segments_detail"]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"status_name": "SUCCEEDED", "succeeded_units": 5}, "5 objects moved to other hosts"),
        (
            {"status_name": "SUCCEEDED", "succeeded_units": 5, "failed_units": 2, "message": "no room"},
            "5 objects moved to other hosts, 2 stayed: some pages stayed (no room)",
        ),
    ],
)
def test_a_host_says_what_became_of_its_pages(master, job, said):
    master.job(job)
    urls = ("http://127.0.0.1:1", master.url)
    host = Hosting(ClusterConfig(master="127.0.0.1:1", admin_urls=urls), lambda text: None)
    assert host._drained("mine") == said


def test_a_host_that_cannot_ask_a_master_says_so(master):
    master.answers["/health"] = {**SERVING, "service_ready": False}
    host = Hosting(ClusterConfig(master="127.0.0.1:1", admin_urls=(master.url,)), lambda text: None)
    assert (
        host._drained("mine")
        == "pages are not moved (no master serves; cluster.admin_urls says where masters answer)"
    )


def test_what_dies_young_waits_longer_each_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hosting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    restarts = hosting._Restarts()
    pauses = []
    for _ in range(8):
        restarts.began()
        now[0] += 1
        pauses.append(restarts.died())
        assert restarts.died() is None
        assert not restarts.is_due()
        now[0] += pauses[-1]
        assert restarts.is_due()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    restarts.began()
    now[0] += 61
    assert restarts.died() == 0.5


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b:9003", "http://127.0.0.1:port"])
def test_at_what_is_no_url_nobody_answers(url):
    found = look([url])
    assert found.pool is None
    assert found.masters[0].problem.startswith(f"no answer from {url}: ")


class Refused:
    """A segment that Mooncake does not take."""

    size_bytes, name, problem, exit_code = 1, "", "Mooncake says -600", 1

    def __init__(self, config: ClusterConfig, master: str) -> None: ...

    def start(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return False

    def stop(self) -> None: ...


def test_a_segment_that_is_not_taken_says_which_settings_to_look_at(master, monkeypatch):
    monkeypatch.setattr(hosting, "SegmentProcess", Refused)
    config = ClusterConfig(master=master.url.removeprefix("http://"), start_s=0.1, allow_public=True)
    with pytest.raises(TransferError) as refused:
        Hosting(config, lambda text: None).start()
    said = str(refused.value)
    assert "Mooncake says -600" in said
    assert all(f"cluster.{key}" in said for key in ("segment_bytes", "protocol", "devices", "start_s"))
