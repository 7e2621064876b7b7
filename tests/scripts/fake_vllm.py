# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's HTTP API with a simulated prefix cache, for tests of what a client does.

It starts in a fraction of a second and can be told to misbehave. What it says about policies
proves nothing; the tests marked `server` run the real one.
"""

import argparse
import itertools
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 16


class Cache:
    """Chained blocks in eviction order; in active mode those never hit go first, within a window.

    The window is scan_limit blocks: longer hot prefixes are lost, as with a simple policy.
    """

    def __init__(self, options):
        self.capacity, self.mode = options.blocks, options.mode
        self.window = options.scan_limit
        self.hits = {}  # hash of a prompt up to a block's end -> times hit; the first is evicted
        self.lock = threading.Lock()
        self.queried_tokens = self.hit_tokens = 0

    def lookup(self, prompt):
        chains, chain = [], 0
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            chains.append(chain := hash((chain, *prompt[end - BLOCK : end])))
        with self.lock:
            found = 0
            while found < (len(prompt) - 1) // BLOCK and chains[found] in self.hits:
                found += 1
            kept = {c: self.hits.pop(c) + 1 for c in chains[:found]}
            while len(self.hits) + len(chains) > self.capacity:
                view = itertools.islice(self.hits.items(), self.window)
                never_hit = (c for c, hits in view if hits == 0 and self.mode == "active")
                self.hits.pop(next(never_hit, next(iter(self.hits))))
            for chain in reversed(chains):
                self.hits[chain] = kept.get(chain, self.hits.get(chain, 0))
            self.queried_tokens += len(prompt)
            self.hit_tokens += found * BLOCK
        return found * BLOCK


class Tier:
    """A tier that keeps all it saw; like vLLM it leaves a prompt's last token to be computed."""

    def __init__(self, options):
        self.on, self.seen, self.hit_tokens = options.tier, set(), 0
        self.lock = threading.Lock()

    def lookup(self, prompt, device_tokens):
        """Return the tokens that it serves of a prompt beyond those of the device."""
        chains = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        with self.lock:
            known = 0
            while known < len(chains) and chains[known] in self.seen:
                known += 1
            self.seen.update(chains)
            found = max(0, min(known * BLOCK, len(prompt) - 1) - device_tokens) if self.on else 0
            self.hit_tokens += found
        return found


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, options):
        super().__init__((options.host, options.port), Handler)
        self.options, self.cache, self.served = options, Cache(options), 0
        self.tier = Tier(options)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one segment: two would wait for a delayed ACK

    def log_message(self, *arguments):
        pass

    def answer(self, body, kind="application/json", status=200):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        options, cache = self.server.options, self.server.cache
        if self.path == "/health":
            self.answer("")
        elif self.path == "/version":
            self.answer({"version": "0.32.0"})
        elif self.path == "/v1/models":
            key = self.headers.get("Authorization")
            if options.api_key and key != f"Bearer {options.api_key}":
                self.answer({"error": "Unauthorized"}, status=401)
            else:
                self.answer({"data": [{"id": "fake"}]})
        elif self.path == "/metrics" and options.no_counters:
            self.answer("", "text/plain")
        elif self.path == "/metrics":
            labels = '{engine="0",model_name="fake"}'
            extra = options.foreign_tokens * self.server.served
            source = labels.replace("}", ',source="device"}')
            tier = (
                "# TYPE vllm:external_prefix_cache_hits counter\n"
                f"vllm:external_prefix_cache_hits_total{labels} {self.server.tier.hit_tokens}.0\n"
                "# TYPE vllm:prompt_tokens_cached_by_source counter\n"
                f"vllm:prompt_tokens_cached_by_source_total{source} {cache.hit_tokens}.0\n"
            )
            self.answer(
                (tier if options.tier else "") + "# TYPE vllm:prefix_cache_queries counter\n"
                f"vllm:prefix_cache_queries_total{labels} {cache.queried_tokens + extra}.0\n"
                "# TYPE vllm:prefix_cache_hits counter\n"
                f"vllm:prefix_cache_hits_total{labels} {cache.hit_tokens}.0\n",
                "text/plain",
            )
        elif self.path == "/policy/metrics" and options.mode != "unpatched":
            mode, limit = options.report_mode or options.mode, options.scan_limit
            labels = f'engine="0",pool="0",mode="{mode}",scan_limit="{limit}"'
            weights = 'reuse_weight="64",depth_weight="1",age_weight="1"'
            rest = 'quick_demote_penalty="4096",log_every="256"'
            self.answer(
                "# TYPE vllm:computecache_info gauge\n"
                f"vllm:computecache_info{{{labels},{weights},{rest}}} 1.0\n"
                "# TYPE vllm:computecache_victims counter\n"
                'vllm:computecache_victims_total{engine="0",pool="0",class="reused"} 3.0\n',
                "text/plain",
            )
        else:
            self.answer({"error": "not found"}, status=404)

    def do_POST(self):
        options = self.server.options
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": list(range(100, 400)), "max_model_len": options.max_model_len})
            return
        self.server.served += 1
        if options.die_at == self.server.served:
            self.server.shutdown()
            self.server.socket.close()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if options.fail_at and self.server.served >= options.fail_at:
            self.answer({"error": "engine dead"}, status=500)
            return
        cached = self.server.cache.lookup(body["prompt"])
        cached += self.server.tier.lookup(body["prompt"], cached)
        time.sleep(options.delay_s + options.token_s * (len(body["prompt"]) - cached))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if not options.no_usage_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        text = str(sum(body["prompt"])) + options.text_suffix
        events = [
            {"choices": [{"text": text if i == 0 else ""}]} for i in range(body["max_tokens"])
        ]
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self.answer("".join(lines), "text/event-stream")


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--mode", default="lru", help="unpatched: no policy endpoint")
    parser.add_argument("--report-mode", help="claim another mode than the one in force")
    parser.add_argument("--scan-limit", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--api-key")
    parser.add_argument("--fail-at", type=int, help="HTTP 500 from this completion on")
    parser.add_argument("--die-at", type=int, help="stop serving at this completion")
    parser.add_argument("--foreign-tokens", type=int, default=0, help="counted beside each request")
    parser.add_argument("--no-counters", action="store_true")
    parser.add_argument("--no-usage-details", action="store_true")
    parser.add_argument("--tier", action="store_true", help="a KV tier beside the device")
    parser.add_argument("--text-suffix", default="")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0, help="per token not in the cache")
    return parser.parse_args(argv)


if __name__ == "__main__":
    Fake(parse()).serve_forever()
