# SPDX-License-Identifier: Apache-2.0
"""prefix_pressure.py as an operator runs it, against a simulated server."""

import json

import pytest

SMALL = ("--hot-tokens", 320, "--flood-tokens", 640, "--flood-requests", 4)


@pytest.fixture
def press(script):
    def run(server, *arguments, **env):
        addresses = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
        return script("prefix_pressure.py", *addresses, *SMALL, *arguments, **env)

    return run


@pytest.mark.parametrize(("mode", "kept"), [("lru", 0), ("active", 304)])
def test_the_json_says_what_survived(fake, press, mode, kept):
    with fake("--mode", mode) as server:
        done = press(server, "--repetitions", 2, "--survival", "1,2", "--control-requests", 1)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mode"] == mode
    assert report["scan_limit"] == 64
    assert report["warm_prefix_cached_tokens"] == 304
    assert report["post_flood_cached_tokens"] == kept
    assert report["hot_prefix_preserved"] is (kept == 304)
    assert report["flood_requests"] == 4
    assert report["failures"] == []
    assert report["problems"] == []
    assert report["ttft_ms"]["hot_replay"]["samples"] == 2
    assert report["ttft_ms"]["flood"]["samples"] == 8
    assert report["ttft_ms"]["control"]["p50"] > 0
    assert report["tokens"]["flood"] == {"prompt": 8 * 640, "cached": 0}
    assert [r["flood_requests"] for r in report["replays"]] == [4, 4, 1, 2]
    assert report["counters"]["hits_tokens"] == sum(t["cached"] for t in report["tokens"].values())
    assert report["policy"]["counters"] == {"victims_reused": 3}


def test_counters_stand_in_for_usage_without_details(fake, press):
    with fake("--mode", "active", "--no-usage-details") as server:
        done = press(server)
    assert json.loads(done.stdout)["post_flood_cached_tokens"] == 304


@pytest.mark.parametrize("mode", ["lru", "active"])
def test_what_a_tier_serves_is_not_what_the_device_kept(fake, press, mode):
    """The tier has all 319 tokens that can be cached; what of them the device keeps is judged."""
    kept = {"lru": 0, "active": 304}[mode]
    with fake("--mode", mode, "--tier") as server:
        done = press(server, "--repetitions", 2)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["warm_prefix_cached_tokens"] == 304
    assert report["post_flood_cached_tokens"] == kept
    assert [r["external_tokens"] for r in report["replays"]] == [319 - kept] * 2
    assert report["tier"]["external_tokens"] == 2 * 15 + 2 * (319 - kept)
    assert report["tier"]["unassigned_tokens"] == 0


def test_without_a_tier_the_report_has_nothing_of_it(fake, press):
    with fake("--mode", "active") as server:
        done = press(server)
    assert "tier" not in json.loads(done.stdout)
    assert "external" not in done.stdout


def test_one_use_prompts_that_the_tier_has_from_before_are_told(fake, press):
    with fake("--mode", "lru", "--tier") as server:
        first, second = (json.loads(press(server).stdout)["tier"] for _ in range(2))
    assert first["unassigned_tokens"] == 0
    # Two of the ramp and four of the flood, each but for its last token or what the device had.
    assert second["unassigned_prompt_tokens"] == 6 * 640
    assert second["unassigned_tokens"] > 0.9 * second["unassigned_prompt_tokens"]


def test_other_traffic_is_noticed_beside_a_tier(fake, press):
    with fake("--foreign-tokens", 16, "--tier") as server:
        done = press(server)
    assert done.returncode == 2
    assert "other traffic" in done.stderr


def test_shapes_that_run_side_by_side_are_not_judged_beside_a_tier(fake, press):
    with fake("--blocks", 128, "--tier") as server:
        done = press(server, "--shape", "zipf", "--max-requests", 30, "--concurrency", 3)
    assert done.returncode == 2
    assert "run the server without its KV connector, or take --shape pressure" in done.stderr
    assert json.loads(done.stdout)["tier"]["unassigned_tokens"] > 0


def test_a_failed_request_is_in_the_json_and_in_the_exit_code(fake, press):
    with fake("--fail-at", 5) as server:
        done = press(server)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["failures"][0]["error"].startswith("HTTP 500")
    assert report["requests"]["failed"] == len(report["failures"]) > 0
    assert report["hot_prefix_preserved"] is False


def test_a_server_that_ends_in_the_middle_is_a_failure(fake, press):
    with fake("--die-at", 6) as server:
        done = press(server)
    assert done.returncode == 1
    assert json.loads(done.stdout)["requests"]["failed"] >= 1


def test_traffic_of_others_makes_the_run_worthless(fake, press):
    with fake("--foreign-tokens", 16) as server:
        done = press(server)
    assert done.returncode == 2
    assert "other traffic" in done.stderr


def test_missing_counters_are_an_error_not_zero(fake, press):
    with fake("--no-counters") as server:
        done = press(server)
    assert done.returncode == 2
    assert "vllm:prefix_cache_queries_total" in done.stderr
    assert done.stdout == ""


def test_a_server_without_a_policy_must_be_expected(fake, press):
    with fake("--mode", "unpatched") as server:
        surprised, expected = press(server), press(server, "--expect-unpatched")
    assert surprised.returncode == 2
    assert "--expect-unpatched" in surprised.stderr
    assert json.loads(expected.stdout)["mode"] == "unpatched"
    with fake("--mode", "lru") as server:
        assert press(server, "--expect-unpatched").returncode == 2


def test_prompts_that_do_not_fit_are_refused_before_anything_is_sent(fake, press):
    with fake("--max-model-len", 512) as server:
        done = press(server)
        assert server.served == 0
    assert done.returncode == 2
    assert "max-model-len of 512" in done.stderr


def test_the_key_is_read_from_the_environment_and_never_shown(fake, press):
    key = "k3y-of-this-test"
    with fake("--api-key", key) as server:
        refused, accepted = press(server, VLLM_API_KEY="wrong"), press(server, VLLM_API_KEY=key)
    assert refused.returncode == 2
    assert "HTTP 401 (set VLLM_API_KEY)" in refused.stderr
    assert accepted.returncode == 0
    assert key not in accepted.stdout + accepted.stderr


def test_max_seconds_and_max_requests_bound_a_run(fake, press):
    with fake("--delay-s", 0.1) as server:
        done = press(server, "--max-seconds", 0.5)
        assert done.returncode == 2
        assert "--max-seconds ended the run" in done.stderr
        assert json.loads(press(server, "--max-requests", 4).stdout)["requests"]["sent"] == 4


@pytest.mark.parametrize(
    "shape",
    [
        ("--shape", "zipf", "--max-requests", 30, "--concurrency", 3),
        ("--shape", "zipf", "--max-requests", 30, "--concurrency", 8, "--arrivals", 200),
        ("--shape", "sessions", "--prefixes", 3, "--turns", 3, "--concurrency", 3),
    ],
)
def test_other_shapes_reuse_what_they_should(fake, press, shape):
    with fake("--blocks", 512) as server:
        done = press(server, *shape)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    reused = "session_turn" if "sessions" in shape else "hot"
    assert report["tokens"][reused]["cached"] > 0.5 * report["tokens"][reused]["prompt"]
    assert report["counters"]["hit_ratio"] > 0.1


def test_a_trace_is_replayed(fake, press, tmp_path):
    trace = tmp_path / "trace.jsonl"
    records = [
        {"timestamp_ms": i, "input_length": 1024, "hash_ids": [0, i % 3 + 1]} for i in range(12)
    ]
    trace.write_text("".join(json.dumps(r) + "\n" for r in records))
    with fake() as server:
        done = press(server, "--shape", "trace", "--trace", trace, "--trace-block-tokens", 64)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["requests"] == {"planned": 12, "sent": 12, "failed": 0}
    # 1 of 12 shares nothing, 2 share the first block only, 9 all but what must be computed.
    assert report["tokens"]["trace"] == {"prompt": 12 * 128, "cached": 2 * 64 + 9 * 112}


def test_a_plan_without_requests_is_refused(fake, press, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    with fake() as server:
        done = press(server, "--shape", "trace", "--trace", trace)
    assert done.returncode == 2
    assert "no request" in done.stderr


@pytest.mark.parametrize("name", ["prefix_pressure.py", "canary.py", "tune_scan_limit.py"])
def test_a_trace_shape_without_a_trace_is_refused_before_any_server(script, tmp_path, name):
    where = ["--target", "compose", "--out", tmp_path / "out", "--project", tmp_path]
    where = {"canary.py": ["run", *where], "tune_scan_limit.py": where}.get(name, [])
    done = script(name, *where, "--shape", "trace")
    assert done.returncode == 2
    assert "--shape trace needs --trace FILE" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_that_json_cannot_hold_are_refused(script, value):
    done = script("prefix_pressure.py", "--max-seconds", value)
    assert done.returncode == 2
    assert f"{value} is not a number: give a large one" in done.stderr


def test_a_local_server_is_pressed_past_proxies_that_lead_nowhere(fake, script):
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    dead |= {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "fd00::/8,example.org"}
    dead |= {name.lower(): value for name, value in dead.items()}
    with fake("--mode", "active") as server:
        where = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
        done = script("prefix_pressure.py", *where, "--hot-tokens", 320, **dead)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"]["failed"] == 0


def test_proxy_settings_that_cannot_be_used_for_another_machine_are_named(script):
    where = ("--base-url", "http://far.example:8000")
    done = script("prefix_pressure.py", *where, ALL_PROXY="socks5://127.0.0.1:9")
    assert done.returncode == 2
    assert "unset or correct ALL_PROXY" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prefix_that_can_never_hit_is_no_success(fake, script):
    with fake() as server:
        where = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
        done = script("prefix_pressure.py", *where, "--hot-tokens", 16)
    assert done.returncode == 2
    assert "a hot prefix of 16 tokens was not in the cache when it was sent again" in done.stderr


def test_a_percentile_of_few_samples_is_said_to_be_one(fake, press):
    with fake("--blocks", 512) as server:
        done = press(server, "--repetitions", 5)  # 20 floods, 5 replays
    report = json.loads(done.stdout)
    assert "p95 of hot_replay rests on 5 samples, 20 are needed" in " ".join(report["notes"])
    assert not [note for note in report["notes"] if note.startswith("p95 of flood ")]
    assert [note for note in report["notes"] if note.startswith("p99 of flood ")]
    assert "note: p95 of hot_replay rests on 5 samples" in done.stderr


def test_max_seconds_also_ends_a_wait_for_the_next_request(fake, press):
    with fake() as server:
        done = press(server, "--arrivals", "1e-9", "--max-seconds", 1)
    assert done.returncode == 2
    assert "--max-seconds ended the run" in done.stderr
