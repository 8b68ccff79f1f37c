import json
import socket
import time
import urllib.request
from contextlib import ExitStack

import msgspec
import openai
import pytest
from tests.gateway.faulty_servers import Seat

from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

# Patient with clients, or a busy machine would fail tests that are about something else.
PATIENT = ServerConfig(port=0, shutdown_s=1, keepalive_s=0.2, body_bytes_max="64KiB")
HASTY = msgspec.structs.replace(PATIENT, read_timeout_s=0.5, send_timeout_s=0.5)


class Wire:
    """Plain HTTP against a base URL."""

    def __init__(self, base_url):
        self.base_url = base_url
        self.address = ("127.0.0.1", int(base_url.rsplit(":", 1)[1]))

    def request(self, method, path, body=None, headers=None):
        """(status, headers, decoded body or bytes)."""
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        sent = urllib.request.Request(self.base_url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(sent, timeout=20) as answer:
                return answer.status, answer.headers, _decode(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, _decode(error.read())

    def get(self, path, headers=None):
        return self.request("GET", path, None, headers)

    def post(self, path, body, headers=None):
        return self.request("POST", path, body, headers)

    def chat(self, content="Hi", headers=None, **fields):
        body = {"model": "fake-model", "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body, headers)

    def open(self):
        return socket.create_connection(self.address, timeout=10)


def _decode(data):
    try:
        return json.loads(data)
    except ValueError:
        return data


def wait_until(fact, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def until():
    return wait_until


@pytest.fixture
def wire_to():
    """Makes a `Wire` for a base URL."""
    return Wire


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def config():
    return PATIENT


@pytest.fixture
def app(engine, config):
    return build_app(engine, config)


@pytest.fixture
def base_url(app, config):
    with running(app, config) as url:
        yield url


@pytest.fixture
def wire(base_url):
    return Wire(base_url)


@pytest.fixture(scope="module")
def idle_engine():
    """An engine that no request should reach."""
    return FakeEngine()


@pytest.fixture(scope="module")
def refusing(idle_engine):
    """A `Wire` shared by the many small tests whose requests are all refused."""
    with running(build_app(idle_engine, PATIENT), PATIENT) as url:
        yield Wire(url)


@pytest.fixture
def hasty(engine):
    """A `Wire` to a server that soon loses patience with slow clients."""
    with running(build_app(engine, HASTY), HASTY) as url:
        yield Wire(url)


@pytest.fixture
def model():
    """Name of the served model; a real engine's tests override it together with `base_url`."""
    return "fake-model"


@pytest.fixture
def openai_client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def seats():
    """Four (seat, base URL) of servers; each test has its own stand-ins sit there."""
    with ExitStack() as stack:
        seats = [Seat() for _ in range(4)]
        config = ServerConfig(port=0, shutdown_s=1)
        yield [(seat, stack.enter_context(running(seat, config))) for seat in seats]
