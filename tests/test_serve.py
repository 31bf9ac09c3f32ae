"""`mcretrofit serve` as a process with a socket: it streams, notices who has gone, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from cli_helpers import ROOT, pico, refused, runner

pytest.importorskip("uvicorn", reason="the server needs uvicorn")
httpx = pytest.importorskip("httpx", reason="this client is httpx")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a pico model at a free port: its base address; it lets one request run at once."""
    folder = tmp_path_factory.mktemp("serve")
    pico(folder / "base")
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "mcretrofit",
        "serve",
        "base",
        "--port",
        "0",
        "--segment",
        "16",
    ]
    command += ["--base-only", "--max-requests", "1", "--max-length", "10000000"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=open(folder / "log", "w"),  # noqa: SIM115  closed with the process
        text=True,
    )
    line = process.stdout.readline()
    assert line.startswith("serving base at http://127.0.0.1:"), (folder / "log").read_text()
    yield line.split()[-1], folder / "log", process
    process.kill()
    process.wait()


def body(**fields: object) -> dict:
    return {"prompt": "private words", "max_tokens": 5_000_000, "temperature": 0, **fields}


def test_a_client_that_goes_frees_its_place(server):
    address, log, process = server
    key = {"Authorization": "Bearer private-key"}
    with httpx.Client(base_url=address, headers=key, timeout=60) as client:
        assert client.get("/models").json()["data"][0]["id"] == "base"
        with client.stream("POST", "/completions", json=body(stream=True)) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = [json.loads(next(lines)[6:]) for _ in range(3)]
            assert all(part["object"] == "text_completion" for part in first)
            busy = client.post("/completions", json=body(max_tokens=2))
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        assert wait(client).json()["usage"]["completion_tokens"] == 2
        # one that waits for the whole answer and gives up
        with pytest.raises(httpx.ReadTimeout):
            client.post("/completions", json=body(), timeout=0.5)
        assert wait(client).json()["choices"][0]["finish_reason"] == "length"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) in (0, 1)
    written = log.read_text()
    assert "private" not in written and "Traceback" not in written


def wait(client):
    """The answer to a short request, as soon as there is room for it."""
    until = time.monotonic() + 20
    while True:
        answer = client.post("/completions", json=body(max_tokens=2))
        if answer.status_code == 200 or time.monotonic() > until:
            return answer
        time.sleep(0.1)


def test_what_cannot_be_served(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runner(capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("serve", "builtin:gla", "--port", port), 1, f"port {port}", "in use")
    refused(run("serve", "builtin:gla", "--port", 70000), 2, "--port 70000")
    refused(run("serve", "builtin:gla", "--cache-size", "big"), 2, "--cache-size big")
    refused(run("serve", "builtin:gla", "--max-requests", 0), 2, "--max-requests 0")
    refused(run("serve", "none.safetensors", "--port", 0), 1, "no such file or folder")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(run("serve", "builtin:gla"), 1, "uvicorn", "pip install 'mcretrofit[serve]'")
