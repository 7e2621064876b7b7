# SPDX-License-Identifier: Apache-2.0
"""The embedded server's process handling, with small programs in vLLM's place; and its model."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer

from servers.embedded import EmbeddedServer, ServerError
from servers.processes import free_port, group_members, stop_group
from servers.tiny_model import END_OF_TEXT, VOCAB_SIZE, make_model

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
os.write(1, b"deaf")
time.sleep(600)
"""
HEALTHY = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PRINT_SETTINGS = """
import json, os
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("COMPUTECACHE_")}))
"""


def server(tmp_path, program, mode="lru"):
    made = EmbeddedServer(tmp_path, mode, tmp_path / "server.log")
    made.command = [sys.executable, "-c", program, made.base_url.rpartition(":")[2]]
    return made


def test_a_server_that_ends_is_an_error_with_its_code_and_last_words(tmp_path):
    with (
        pytest.raises(ServerError, match=r"ended with 3:\n.*out of memory"),
        server(tmp_path, "print('out of memory'); raise SystemExit(3)"),
    ):
        raise AssertionError("it was taken for ready")


def test_leaving_the_context_ends_the_children_too(tmp_path):
    with server(tmp_path, HEALTHY) as running:
        group = running.process.pid
        assert len(group_members(group)) == 2
        assert running.exit_code is None
        assert running.ready_s >= 0
    assert group_members(group) == []
    assert running.exit_code == -signal.SIGTERM


def test_children_that_survive_their_parent_are_ended(tmp_path):
    with server(tmp_path, HEALTHY) as running:
        group = running.process.pid
        assert running.wait_for_exit(0) is None
        os.kill(group, signal.SIGKILL)
        assert running.wait_for_exit(60) == -signal.SIGKILL
        assert group_members(group) != []
        assert running.exit_code == -signal.SIGKILL
    assert group_members(group) == []


def test_a_group_that_ignores_term_is_killed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.read(8) == b"deafdeaf"
    started = time.monotonic()
    stop_group(process.pid, timeout_s=0.3)
    assert group_members(process.pid) == []
    assert time.monotonic() - started >= 0.3
    process.wait()
    process.stdout.close()
    stop_group(process.pid)  # gone already: nothing happens


def test_settings_reach_the_server_and_the_shells_own_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPUTECACHE_MODE", "active")
    monkeypatch.setenv("COMPUTECACHE_AGE_WEIGHT", "9")
    for mode, expected in (("lru", {"MODE", "SCAN_LIMIT", "METRICS_PORT"}), (None, set())):
        started = server(tmp_path, PRINT_SETTINGS, mode)
        started.start()
        started.process.wait()
        seen = json.loads(started.log.read_text())
        assert set(seen) == {f"COMPUTECACHE_{name}" for name in expected}
        assert mode is None or seen["COMPUTECACHE_MODE"] == "lru"
        started.stop()


def test_everything_is_bound_to_loopback(tmp_path):
    command = EmbeddedServer(tmp_path, "lru", tmp_path / "log").command
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert free_port() != free_port()


def fingerprint(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_model_is_the_same_every_time_and_made_once(tmp_path):
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    assert fingerprint(first) == fingerprint(second)
    before = (first / "model.safetensors").stat().st_mtime_ns
    make_model(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    (first / "made_by.sha256").write_text("an older script")
    (first / "config.json").write_text("{}")
    make_model(first)
    assert fingerprint(first) == fingerprint(second)


def test_the_tokenizer_fits_the_models_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_model(tmp_path / "m") / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    text = "bado, kilo: mono ümlaut"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
