# SPDX-License-Identifier: Apache-2.0
"""The canary beside a KV tier: servers that find again in the tier what the device lost."""

import json

import pytest

OPTIONS = "--api-key secret-of-this-test"


@pytest.mark.parametrize(("scan_limit", "outcome"), [(64, "ACCEPT"), (1, "REJECT")])
def test_the_device_is_judged_and_the_tier_told_beside_it(stack, scan_limit, outcome):
    """With a scan limit of 1 active evicts as lru does, whatever the tier finds again."""
    stack.fake_options(f"{OPTIONS} --tier")
    with stack.env_file.open("a") as env:
        env.write(f"COMPUTECACHE_SCAN_LIMIT={scan_limit}\n")
    code = stack.run("--flood-tokens", "640", "--survival", "1")
    assert code == {"ACCEPT": 0, "REJECT": 1}[outcome], stack.output
    canary = stack.record()
    assert canary["outcome"] == outcome
    lru, candidate, rollback = canary["phases"]
    assert lru["external_tokens"] == rollback["external_tokens"] > 0
    assert lru["post_flood_cached_tokens"] == 0
    assert candidate["post_flood_cached_tokens"] == (304 if outcome == "ACCEPT" else 0)
    (told,) = [c for c in canary["checks"] if c["name"] == "tier"]
    assert told["status"] == "pass"
    assert f"{candidate['external_tokens']} in the candidate" in told["detail"]


def test_without_a_tier_the_records_have_nothing_of_it(stack):
    stack.fake_options(OPTIONS)
    stack.run("--flood-tokens", "640", "--survival", "1")
    assert "external_tokens" not in json.dumps(stack.record())
