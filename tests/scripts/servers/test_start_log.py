# SPDX-License-Identifier: Apache-2.0
"""The line of vLLM's log that says why it did not start is found among the tracebacks."""

import pytest

from servers.embedded import EmbeddedServer, ServerError
from servers.start_log import cause

TOO_SMALL = (
    "To serve at least one request with the model's max seq len (4096), (0.50 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.03 GiB). Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
AT = '  File "/x/vllm/v1/engine/core.py", line 1120, in __init__\n    super().__init__(\n'
WARNED = "(APIServer pid=1) WARNING 12-01 05:12:46 [u.py:2] errors like `OSError: [Errno 24] x`"
POOL = (
    f"{WARNED}\n"
    "(EngineCore pid=7) ERROR 12-01 05:13:01 [core.py:900] EngineCore failed to start.\n"
    "(EngineCore pid=7) ERROR 12-01 05:13:01 [core.py:900] Traceback (most recent call last):\n"
    f"(EngineCore pid=7) ERROR 12-01 05:13:01 [core.py:900] ValueError: {TOO_SMALL}\n"
    f"(EngineCore pid=7) Traceback (most recent call last):\n{AT}"
    f"(EngineCore pid=7) ValueError: {TOO_SMALL}\n"
    f"(APIServer pid=1) Traceback (most recent call last):\n{AT * 12}"
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}\n"
)
LOGS = {
    "the pool is too small": (POOL, f"ValueError: {TOO_SMALL}"),
    "only the consequence is left": (POOL[POOL.index("(APIServer pid=1) Trace") :], None),
    "a setting is refused": (
        f"{AT}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9) is greater than 8 [type=value_error]\n"
        "    For further information visit https://errors.example\n",
        "ValidationError: 1 validation error for ModelConfig: Value error, User-specified "
        "max_model_len (9) is greater than 8",
    ),
    "an option that is none": (
        "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --blok\n",
        "error: unrecognized arguments: --blok",
    ),
    "an exception of a package": (f"{AT}torch.OutOfMemoryError: CUDA out of memory.\n", "OutOf"),
    "no reason": (f"{WARNED}\nKilled\n", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_reason_is_the_first_exception_that_follows_from_no_other(name):
    log, reason = LOGS[name]
    found = cause(log)
    assert found == reason if reason is None else found.startswith(reason)


def test_a_server_that_does_not_start_says_its_reason_first(tmp_path, monkeypatch):
    server = EmbeddedServer(tmp_path, "lru", tmp_path / "server.log")
    monkeypatch.setattr(server, "command", ["sh", "-c", f"cat {tmp_path / 'said'}; exit 1"])
    (tmp_path / "said").write_text(POOL)
    try:
        server.start()
        with pytest.raises(ServerError) as raised:
            server.wait_until_ready()
    finally:
        server.stop()
    first = str(raised.value).splitlines()[0]
    assert first.startswith(f"the server ended with 1: ValueError: {TOO_SMALL}; the end of ")
