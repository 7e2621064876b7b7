# SPDX-License-Identifier: Apache-2.0
"""Answers that no vLLM gives, to every command: exit 2, one line on what came, and the record.

The commands run in this process, as run_command runs them, against a server that is told what to
answer at one path.
"""

import gzip
import io
import json
import sys

import pytest

import canary
import prefix_pressure
import tune_scan_limit
from drills import session
from drills.targets import UrlTarget
from serving import client as client_module
from serving.command import run_command

HTML = b"<!doctype html><html><body>It works!</body></html>"
MODELS, TOKENIZE, METRICS = "/v1/models", "/tokenize", "/metrics"
COMPLETIONS, POLICY = "/v1/completions", "/policy/metrics"
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
TOKENS = list(range(100, 400))
GOOD_EVENT = {"choices": [{"text": "a"}]}
CUT = gzip.compress(json.dumps({"data": [{"id": "m" * 999}]}).encode())[:20]


def event(value):
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def series(queries, hits="0"):
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    return "".join(f"{n} {v}\n" for n, v in zip(names, (queries, hits), strict=True)).encode()


# name: (path, body, what the line has to say, status, headers)
ODD = {
    "models: a page": (MODELS, HTML, "no JSON came but text/html (<!doctype html>"),
    "models: nothing": (MODELS, b"", "no JSON came but text/html (empty)"),
    "models: a redirect": (MODELS, b"", "a redirect to http://sso.example/", 302),
    "models: not changed": (MODELS, b"", "HTTP 304", 304),
    "models: no content": (MODELS, b"", "HTTP 204", 204),
    "models: empty list": (MODELS, {"data": []}, "the list of models is empty"),
    "models: data null": (MODELS, {"data": None}, "no list of models came"),
    "models: data a number": (MODELS, {"data": 7}, "no list of models came"),
    "models: no ids": (MODELS, {"data": [{}]}, "no list of models came"),
    "models: id null": (MODELS, {"data": [{"id": None}]}, "no list of models came"),
    "models: a list": (MODELS, [], "no JSON object came"),
    "models: an error": (MODELS, {"error": {"message": "busy"}}, 'HTTP 200: {"message": "busy"}'),
    "models: deep": (MODELS, b"[" * 99999, "no JSON came"),
    "models: no UTF-8": (MODELS, b'{"data": "\xff', "no JSON came"),
    "models: gzip cut": (MODELS, CUT, "no JSON came", 200, {"Content-Encoding": "gzip"}),
    "models: no gzip": (MODELS, HTML, "DecodingError", 200, {"Content-Encoding": "gzip"}),
    "tokenize: a page": (TOKENIZE, HTML, "no JSON came"),
    "tokenize: a redirect": (TOKENIZE, b"", "a redirect to", 307),
    "tokenize: no length": (TOKENIZE, {"tokens": TOKENS}, "max_model_len is null"),
    "tokenize: a text": (
        TOKENIZE,
        {"tokens": TOKENS, "max_model_len": "9"},
        'max_model_len is "9"',
    ),
    "tokenize: NaN": (TOKENIZE, b'{"tokens": [1], "max_model_len": NaN}', "max_model_len is NaN"),
    "tokenize: null": (TOKENIZE, {"tokens": None, "max_model_len": 1024}, "no token ids came"),
    "tokenize: words": (TOKENIZE, {"tokens": ["a"], "max_model_len": 99}, "no token ids came"),
    "tokenize: few": (TOKENIZE, {"tokens": [1], "max_model_len": 1024}, "64 are needed"),
    "metrics: a page": (METRICS, HTML, "no metrics came but <!doctype html>"),
    "metrics: a redirect": (METRICS, b"", "a redirect to", 301),
    "metrics: nothing": (METRICS, b"", "is not on /metrics"),
    "metrics: no sample": (METRICS, b"# TYPE a counter\n", "is not on /metrics"),
    "metrics: NaN": (METRICS, series("NaN"), "is nan, no count"),
    "metrics: Inf": (METRICS, series("0", "+Inf"), "is inf, no count"),
    "policy: a page": (POLICY, HTML, "no metrics came"),
    "policy: a redirect": (POLICY, b"", "a redirect to", 302),
    "policy: no labels": (POLICY, b"vllm:computecache_info 1\n", "holds no settings"),
    "policy: another's": (POLICY, series(1), "serves no policy"),
    "stream: a page": (COMPLETIONS, HTML, "no stream of events came but <!doctype"),
    "stream: nothing": (COMPLETIONS, b"", "ended before its usage record"),
    "stream: a redirect": (COMPLETIONS, b"", "a redirect to", 302),
    "stream: an error": (COMPLETIONS, {"error": "busy"}, 'no stream of events came but {"error"'),
    "stream: text null": (COMPLETIONS, event({"choices": [{"text": None}]}), "no text"),
    "stream: choices null": (COMPLETIONS, event({"choices": None}), "no text"),
    "stream: choices odd": (COMPLETIONS, event({"choices": [7]}), "no text"),
    "stream: no choices": (COMPLETIONS, event({}), "no text"),
    "stream: a list": (COMPLETIONS, event([]), "no JSON object"),
    "stream: data null": (COMPLETIONS, event("null"), "no JSON object"),
    "stream: no JSON": (COMPLETIONS, event("{"), "an event is no JSON"),
    "stream: deep": (COMPLETIONS, event("[" * 99999), "an event is no JSON"),
    "stream: no usage": (COMPLETIONS, event(GOOD_EVENT) + event("[DONE]"), "before its usage"),
    "stream: usage short": (
        COMPLETIONS,
        event(GOOD_EVENT | {"usage": {"prompt_tokens": 3}}),
        "has no completion_tokens",
    ),
    "stream: usage odd": (COMPLETIONS, event(GOOD_EVENT | {"usage": [1]}), "no completion_tokens"),
    "stream: cached odd": (
        COMPLETIONS,
        event(
            GOOD_EVENT
            | {"usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": "x"}}}
        ),
        "cached_tokens is no count",
    ),
    "stream: no gzip": (COMPLETIONS, HTML, "be decoded", 200, {"Content-Encoding": "gzip"}),
    "stream: gzip cut": (
        COMPLETIONS,
        CUT,
        "no stream of events",
        200,
        {"Content-Encoding": "gzip"},
    ),
}


@pytest.fixture
def odd(fake):
    """odd(path, body, status, headers): a fake server that answers so at this path."""

    def make(path, body, status=200, headers=None):
        made = fake("--mode", "active")
        server = made.__enter__()
        opened.append(made)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "text/html" if isinstance(body, bytes) else JSON

        class Odd(server.RequestHandlerClass):
            def answer_oddly(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                if status in (301, 302, 307):
                    self.send_header("Location", "http://sso.example/")
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer_oddly() if self.path == path else super().do_GET()

            def do_POST(self):
                self.answer_oddly() if self.path == path else super().do_POST()

        server.RequestHandlerClass = Odd
        return server

    opened = []
    yield make
    for made in opened:
        made.__exit__(None, None, None)


def run(monkeypatch, main, *arguments):
    """Run a command as its process would; return its exit code, stdout and stderr."""
    monkeypatch.setattr(client_module, "COUNTER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    out, errors = io.StringIO(), io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        code = run_command(lambda: main([str(argument) for argument in arguments]))
    return code, out.getvalue(), errors.getvalue()


def press(monkeypatch, server, out):
    where = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
    return run(monkeypatch, prefix_pressure.main, *where, "--hot-tokens", 320)


def drill(monkeypatch, server, out):
    """The canary on two given addresses, which are one here."""
    address = []
    for side in ("baseline", "candidate"):
        address += [f"--{side}-url", server.url, f"--{side}-policy-url", server.policy_url]
    where = ("run", "--target", "url", "--out", out, *address)
    return run(monkeypatch, canary.main, *where, "--hot-tokens", 320)


def tune(monkeypatch, server, out):
    """The search for a scan limit, whose servers are not started here."""
    site = (server.url, [server.policy_url])
    monkeypatch.setattr(session, "make_target", lambda options, save: UrlTarget(site, site))
    where = ("--target", "embedded", "--out", out, "--limits", "32")
    return run(monkeypatch, tune_scan_limit.main, *where, "--hot-tokens", 320)


COMMANDS = {press: None, drill: "canary.json", tune: "scan_limit.json"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_2_and_a_line_with_address_and_cause(
    odd, tmp_path, monkeypatch, command, name
):
    path, body, said, *more = ODD[name]
    server = odd(path, body, *more)
    code, _, errors = command(monkeypatch, server, tmp_path / "out")
    assert code == 2, errors
    assert "Traceback" not in errors
    assert "could not run" not in errors, "it was foreseen"
    (line, *_) = [line for line in errors.splitlines() if said in line]
    assert server.url in line or "64 are needed" in line
    if record := COMMANDS[command]:
        kept = json.loads((tmp_path / "out" / record).read_text())
        assert said in json.dumps(kept["checks"]).replace('\\"', '"').replace('\\\\"', '"')


FINE = {
    "no blank after data:": lambda text: text.replace(b"data: ", b"data:"),
    "several lines of data": lambda text: text.replace(b'{"choices"', b'{\ndata: "choices"'),
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "comments and names": lambda text: b": ping\n\nevent: x\nid: 7\n" + text,
    "no last line end": lambda text: text.removesuffix(b"data: [DONE]\n\n").rstrip(b"\n"),
}


@pytest.mark.parametrize("name", FINE)
def test_a_stream_that_the_standard_allows_is_read(odd, tmp_path, monkeypatch, name):
    usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}
    text = event(GOOD_EVENT | {"usage": None}) + event({"choices": [], "usage": usage})
    server = odd(COMPLETIONS, FINE[name](text + event("[DONE]")))
    code, out, errors = press(monkeypatch, server, tmp_path)
    assert "FAILED" not in errors
    report = json.loads(out)
    assert report["tokens"]["flood"]["cached"] == 16 * 6, errors
    assert code == 2, "the counters of this server did not move"


ADDRESSES = {
    "http://127.0.0.1:80x": "80x",
    "http://127.0.0.1:99999": "99999 is no port",
    "http://127.0.0.1:0": "0 is no port",
    "http://[::1": "is no address",
    "http://": "is no address",
    "127.0.0.1:8000": "is no address",
    "ftp://127.0.0.1": "is no address",
    "http://a..b:8000": "a..b",
    "http://xn--\u2603.de": "is no address",
    "http://a\x01b": "is no address",
    "": "is no address",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_2_and_named(tmp_path, monkeypatch, address):
    code, _, errors = run(monkeypatch, prefix_pressure.main, "--base-url", address)
    assert code == 2
    assert ADDRESSES[address] in errors
    assert "could not run" not in errors
    if not address:
        return
    addresses = ["--baseline-url", address, "--baseline-policy-url", "http://127.0.0.1:9"]
    addresses += ["--candidate-url", "http://127.0.0.1:9", "--candidate-policy-url", address]
    where = ("run", "--target", "url", "--out", tmp_path)
    code, _, errors = run(monkeypatch, canary.main, *where, *addresses)
    assert code == 2
    assert ADDRESSES[address] in errors
    assert "could not run" not in errors


@pytest.mark.parametrize("host", ["http://127.0.0.1:9", "https://far.example"])
def test_a_file_of_certificates_that_is_missing_is_named(monkeypatch, host):
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file.pem")
    code, _, errors = run(monkeypatch, prefix_pressure.main, "--base-url", host)
    assert code == 2
    assert "unset or correct SSL_CERT_FILE" in errors
    assert "could not run" not in errors
