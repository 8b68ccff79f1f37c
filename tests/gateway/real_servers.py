"""Real servers for `real_upstreams.py`: starting them, asking them, and ending them."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai

TEXT = "/v1/completions"


class Upstream:
    """One real server; `front` is the base URL of the workmem before it."""

    def __init__(self, kind, command, model, front):
        self.kind = kind
        self.model = model
        self.front = front
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = None

    @property
    def client(self):
        return openai.OpenAI(base_url=f"{self.front}/v1", api_key="none", max_retries=0, timeout=120)

    def both(self, path, body):
        """(status, body) by way of the front and asked directly, without what differs by chance."""
        body = {"model": self.model, **body}
        return [
            (status, re.sub(rb'"(id|created)": ?("[^"]*"|\d+)', rb'"\1": 0', data))
            for status, data in (post(base + path, body) for base in (self.front, self.url))
        ]

    def is_idle(self):
        """Whether it computes nothing."""
        if self.kind == "vllm":
            page = get(f"{self.url}/metrics")[1].decode()
            return not sum(
                map(
                    float,
                    re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", page, re.MULTILINE),
                )
            )
        # It has one context and no gauge: a request that is answered at once found it free.
        return post(f"{self.url}{TEXT}", {"prompt": "a", "max_tokens": 1}, timeout_s=4)[0] == 200


def eventually(fact, within_s):
    end = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < end, f"not so within {within_s} s"
        time.sleep(0.1)


def post(url, body, timeout_s=120):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return _fetch(request, timeout_s)


def get(url):
    return _fetch(urllib.request.Request(url), 30)


def _fetch(request, timeout_s):
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def health(front):
    return json.loads(get(f"{front}/health")[1])["servers"]


def counters(front):
    lines = [line.rsplit(" ", 1) for line in get(f"{front}/metrics")[1].decode().splitlines()]
    return {
        name.removeprefix("workmem_"): float(value) for name, value in lines if name.startswith("workmem_")
    }


def delta(front, before):
    return {name: value - before.get(name, 0.0) for name, value in counters(front).items()}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def started(command, log, env=None):
    """A process group of its own, gone on the way out."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            end = time.monotonic() + patience_s
            is_there = _signalled(process, number)
            while is_there and time.monotonic() < end:
                time.sleep(0.2)
                is_there = _signalled(process, 0)


def _signalled(process, number):
    process.poll()
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def version(python, package):
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return (
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
        or "?"
    )
