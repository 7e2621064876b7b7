# SPDX-License-Identifier: Apache-2.0
"""The API key is read in one place, and leaves by none."""

import html
import io
import json
import string
import sys
import urllib.parse

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefix_pressure
from drills.checks import UNKNOWN
from drills.record import write_record
from drills.verdict import Verdict
from serving import secret
from serving.command import Output, run_command, unexpected
from serving.requests import WorkloadError

PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " "
KEYS = st.text(PRINTABLE, min_size=8, max_size=64).filter(lambda key: len(key.strip()) >= 8)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(secret, "_known", set())
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_one_line_end_is_no_part_of_the_key(monkeypatch, tmp_path, end):
    monkeypatch.setenv("VLLM_API_KEY", f"key-of-this-test{end}")
    assert secret.read_api_key(tmp_path / ".env") == "key-of-this-test"


@pytest.mark.parametrize("value", ["", "\n"])
def test_an_empty_key_is_none(monkeypatch, tmp_path, value):
    monkeypatch.setenv("VLLM_API_KEY", value)
    assert secret.read_api_key(tmp_path / ".env") is None


def test_the_environment_wins_over_the_file(monkeypatch, tmp_path):
    (tmp_path / ".env").write_text("VLLM_API_KEY=key-of-the-file\n")
    assert secret.read_api_key(tmp_path / ".env") == "key-of-the-file"
    monkeypatch.setenv("VLLM_API_KEY", "key-of-the-shell")
    assert secret.read_api_key(tmp_path / ".env") == "key-of-the-shell"


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("key-of\nthis-test", "control character"),
        ("key-of-this-test\n\n", "control character"),
        ("key-of\tthis-test", "control character"),
        ("key-of-this-test\x7f", "control character"),
        ("schlüssel-of-test", "not ASCII"),
        ("key-of-\udcff-test", "not ASCII"),
        (" key-of-this-test", "begins or ends with a blank"),
    ],
)
def test_a_key_that_no_header_can_hold_is_refused_without_its_value(
    monkeypatch, tmp_path, key, fault
):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(WorkloadError, match=f"VLLM_API_KEY in the environment.*{fault}") as raised:
        secret.read_api_key(tmp_path / ".env")
    assert not any(part in str(raised.value) for part in ("key-of", "this-test", "schl"))


def test_an_env_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / ".env").write_bytes(b"# M\xfcnchen\nVLLM_API_KEY=a\n")
    with pytest.raises(WorkloadError, match="is not UTF-8"):
        secret.read_api_key(tmp_path / ".env")


def spellings(key):
    """As an error, a JSON text, a page and an address would show it."""
    return {
        key,
        repr(key)[1:-1],
        json.dumps(key)[1:-1],
        html.escape(key),
        urllib.parse.quote(key, safe=""),
        key.strip(),
    }


@given(KEYS)
def test_no_key_leaves_in_any_spelling(key):
    secret.remember(key)
    said = io.StringIO()
    try:
        raise ValueError(f"Illegal header value b'Bearer {key}'")
    except ValueError as error:
        print(unexpected(error), repr(error), *spellings(key), file=Output(said))
    assert not [text for text in spellings(key) if text in said.getvalue()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(KEYS)
def test_no_key_is_in_a_record_and_the_record_stays_json(tmp_path, key):
    secret.remember(key)
    verdict = Verdict()
    verdict.add("requests", UNKNOWN, f"the server says: {key!r} is wrong")
    record = {"checks": verdict.checks, "visits": [{"error": key, "n": 1.5, "none": None}]}
    write_record(tmp_path / "a.json", record)
    write_record(tmp_path / "a.html", f"<p>{html.escape(key)}</p>")
    back = json.loads((tmp_path / "a.json").read_text())
    assert back["visits"] == [{"error": back["visits"][0]["error"], "n": 1.5, "none": None}]
    for text in (*back["checks"][0].values(), back["visits"][0]["error"]):
        assert not [spelling for spelling in spellings(key) if spelling in text]
    assert html.escape(key).strip() not in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/metrics", "/v1/completions"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=4
)
@given(
    key=KEYS.map(str.strip).filter(lambda key: len(key) >= 8),
    status=st.sampled_from([200, 401, 500]),
)
def test_a_server_that_sends_the_key_back_does_not_make_it_known(fake, path, key, status):
    with fake() as server, pytest.MonkeyPatch.context() as patch:

        class Echo(server.RequestHandlerClass):
            def echo(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer(f"you sent {self.headers['Authorization']}", "text/plain", status)

            def do_GET(self):
                self.echo() if self.path == path else super().do_GET()

            def do_POST(self):
                self.echo() if self.path == path else super().do_POST()

        server.RequestHandlerClass = Echo
        out, errors = io.StringIO(), io.StringIO()
        where = ["--base-url", server.url, "--policy-metrics-url", server.policy_url]
        patch.setenv("VLLM_API_KEY", key)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        code = run_command(lambda: prefix_pressure.main([*where, "--max-requests", "2"]))
    said = out.getvalue() + errors.getvalue()
    assert code == (1 if path == "/v1/completions" and status != 200 else 2), said
    assert "Traceback" not in said
    assert not [spelling for spelling in spellings(key) if spelling in said]


def test_passwords_of_proxies_addresses_redis_and_grafana_are_secrets_too(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxy-pass%21word@far.example:3128")
    monkeypatch.setenv("REDIS_PASSWORD", "redis-password")
    monkeypatch.setenv("LMCACHE_RESP_PASSWORD", "resp-password")
    secret.remember_environment()
    assert secret.redacted("redis-password resp-password") == "[secret] [secret]"
    secret.remember_address("http://me:address-password@far.example:8000")
    secret.remember_settings({"GRAFANA_ADMIN_PASSWORD": "grafana-password", "MODEL": "some-model"})
    text = "proxy-pass!word proxy-pass%21word address-password grafana-password some-model"
    assert secret.redacted(text) == "[secret] [secret] [secret] [secret] some-model"


def test_a_word_too_short_to_be_a_secret_does_not_spoil_the_texts():
    secret.remember("token", "")
    assert secret.redacted("16 tokens") == "16 tokens"
