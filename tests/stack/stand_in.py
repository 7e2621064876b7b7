# SPDX-License-Identifier: Apache-2.0
"""fake_vllm.py in the place of vLLM in its container: port 8000 the API, 8001 the policy's metrics.

It starts at once, so every moment of a canary can be interrupted on the real engine.
"""

import os
import threading
from http.server import ThreadingHTTPServer

import fake_vllm


class PolicyHandler(fake_vllm.Handler):
    def do_GET(self):
        self.path = f"/policy{self.path}"
        super().do_GET()


class PolicyServer(ThreadingHTTPServer):
    def __init__(self, fake):
        super().__init__(("0.0.0.0", 8001), PolicyHandler)
        self.options, self.cache = fake.options, fake.cache


if __name__ == "__main__":
    given = ("--host", "0.0.0.0", "--port", "8000", "--delay-s", "0.02")
    asked = ("--mode", os.environ["COMPUTECACHE_MODE"], "--api-key", os.environ["VLLM_API_KEY"])
    fake = fake_vllm.Fake(fake_vllm.parse([*given, *asked]))
    threading.Thread(target=PolicyServer(fake).serve_forever, daemon=True).start()
    fake.serve_forever()
