# SPDX-License-Identifier: Apache-2.0
"""The canary on a Compose stack: what is switched and in which order, interrupted or not.

`docker` on PATH is a stand-in (fake_docker.py) and so is the server.
"""

import pytest

from servers.processes import free_port

KEY = "--api-key secret-of-this-test"


def test_accept_leaves_lru_and_the_very_same_env_file(stack):
    assert stack.run() == 0, stack.output
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert stack.env_file.read_bytes() == stack.before
    assert stack.env_file.stat().st_mode & 0o777 == 0o600
    canary, release = stack.record(), stack.record("release.json")
    assert canary["outcome"] == release["outcome"] == "ACCEPT"
    assert [(p["phase"], p["mode"], p["hot_prefix"]) for p in canary["phases"]] == [
        ("baseline", "lru", "lost"),
        ("candidate", "active", "kept"),
        ("rollback", "lru", "lost"),
    ]
    assert release["final_mode"] == "lru"
    assert release["gpu"] == "Fake GPU, 1.0"
    assert release["image"] == "sha256:feed"
    assert release["rollback"]["requests_served"] > 0
    written = "".join(path.read_text() for path in (stack.folder / "out").iterdir())
    assert "secret-of-this-test" not in written + stack.output


def test_promote_leaves_active_after_accept_only(stack):
    assert stack.run("--promote") == 0, stack.output
    assert stack.ups()[-1] == "up active"
    assert b"COMPUTECACHE_MODE=active\n" in stack.env_file.read_bytes()
    assert stack.record("release.json")["final_mode"] == "active"


def test_a_failed_promotion_goes_back_to_lru(stack):
    (stack.folder / "broken_at").write_text("4")  # after lru, active, lru: the promotion
    assert stack.run("--promote") == 1, stack.output
    record = stack.record()
    assert "the promotion failed" in record["reasons"][0]
    assert record["final_mode"] == "lru"
    assert stack.ups()[-2:] == ["up active", "up lru"]
    assert stack.env_file.read_bytes() == stack.before


def test_a_server_that_does_not_start_says_vllms_own_reason_first(stack):
    (stack.folder / "broken_at").write_text("1")
    (stack.folder / "server_log").write_text(
        "(EngineCore pid=7) ERROR 12-01 05:12:46 [core.py:900] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 12-01 05:12:46 [core.py:900]   File "core.py", line 7\n'
        "(EngineCore pid=7) ERROR 12-01 05:12:46 [core.py:900] ValueError: no room for a request\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert stack.run() == 2, stack.output
    assert "  vllm did not start: ValueError: no room for a request; `docker" in stack.output
    assert "container vllm is unhealthy" in stack.output


def test_promote_after_reject_leaves_lru(stack):
    stack.fake_options("--fail-at 40", "active")
    assert stack.run("--promote") == 1, stack.output
    assert stack.ups()[-1] == "up lru"
    assert stack.env_file.read_bytes() == stack.before
    assert "HTTP 500" in stack.record()["reasons"][0]


def test_a_candidate_whose_server_dies_is_rejected_and_rolled_back(stack):
    stack.fake_options("--die-at 40", "active")
    assert stack.run() == 1, stack.output
    assert stack.ups()[-1] == "up lru"
    canary = stack.record()
    assert [p["phase"] for p in canary["phases"]] == ["baseline", "candidate", "rollback"]
    assert canary["phases"][1]["requests_failed"] > 0
    assert canary["phases"][2]["mode"] == "lru"
    assert canary["phases"][2]["requests_served"] > 0


def test_other_texts_in_the_candidate_are_rejected(stack):
    stack.fake_options("--text-suffix x", "active")
    assert stack.run() == 1, stack.output
    assert "outputs at temperature 0" in stack.record()["reasons"][0]


def test_abba_restarts_the_server_for_every_visit(stack):
    assert stack.run("--repeats", "2") == 0, stack.output
    assert stack.ups() == ["up lru", "up active", "up active", "up lru", "up lru"]
    assert stack.record()["statistics"]["kept_tokens"]["pairs"] == 12


def test_an_env_file_without_a_mode_stays_without(stack):
    stack.before = stack.before.replace(b"COMPUTECACHE_MODE=lru\n", b"")
    stack.env_file.write_bytes(stack.before)
    assert stack.run() == 0, stack.output
    assert stack.env_file.read_bytes() == stack.before


@pytest.mark.parametrize("value", ["active", '"active"', "LRU"])
def test_an_env_file_that_says_another_mode_is_refused_and_nothing_is_touched(stack, value):
    text = stack.before.replace(b"=lru", f"={value}".encode())
    stack.env_file.write_bytes(text)
    assert stack.run() == 2, stack.output
    for part in (
        f"COMPUTECACHE_MODE={value.strip(chr(34))} in {stack.env_file}",
        "Write COMPUTECACHE_MODE=lru, `docker compose up -d --wait vllm`",
    ):
        assert part in stack.output
    assert not (stack.folder / "docker.log").exists()
    assert not (stack.out / "canary-state.json").exists()
    assert stack.env_file.read_bytes() == text


def test_after_a_promotion_the_next_canary_is_refused_until_lru_is_back(stack):
    assert stack.run("--promote") == 0, stack.output
    promoted = len(stack.ups())
    assert stack.run() == 2, stack.output
    assert "COMPUTECACHE_MODE=active in" in stack.output
    assert len(stack.ups()) == promoted


def test_an_exported_setting_does_not_reach_compose(stack):
    exported = {"COMPUTECACHE_MODE": "active", "COMPUTECACHE_SCAN_LIMIT": "4"}
    assert stack.run(**exported) == 0, stack.output
    assert "COMPUTECACHE_MODE is exported" in stack.output
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert stack.record()["scan_limit"] == 64


def test_the_port_is_the_one_that_compose_published(stack):
    port = str(free_port())
    assert f"API_PORT={port}\n".encode() not in stack.before
    assert stack.run(API_PORT=port) == 0, stack.output
    addresses = {visit["report"]["base_url"] for visit in stack.record()["visits"]}
    assert addresses == {f"http://127.0.0.1:{port}"}


def test_without_a_published_port_the_message_says_how_to_publish_one(stack):
    (stack.folder / "not_published").touch()
    assert stack.run() == 2, stack.output
    (reason, *_) = stack.record()["reasons"]
    assert "no port 8000/tcp" in reason
    assert 'ports: ["127.0.0.1:8000:8000"] of vllm in compose.yaml' in reason
    assert stack.ups() == ["up lru", "up lru"]


def test_proxies_that_lead_nowhere_are_not_asked(stack):
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    proxies |= {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "fd00::/8,example.org"}
    lower = {name.lower(): value for name, value in proxies.items()}
    assert stack.run(**proxies, **lower) == 0, stack.output


def test_two_canaries_at_once_are_refused(stack):
    process = stack.start()
    stack.wait_for_phase(process, "baseline")
    assert stack.run() == 2
    assert "another drill is running" in stack.output
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_without_an_env_file_nothing_is_touched(stack):
    stack.env_file.unlink()
    assert stack.run() == 2
    assert "copy .env.example" in stack.output
    assert not (stack.folder / "docker.log").exists()
