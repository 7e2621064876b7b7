# SPDX-License-Identifier: Apache-2.0
"""The canary's records on the url target: schema, release record, and the page in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

REPO = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((REPO / "docs" / "canary.schema.json").read_text())
DRILL = ("--hot-tokens", 320, "--ttft-regression", "300%")


def canary(script, out, lru, candidate, *arguments):
    return script(
        "canary.py",
        *("run", "--target", "url", "--out", out, "--project", out, *DRILL),
        *("--baseline-url", lru.url, "--baseline-policy-url", lru.policy_url),
        *("--candidate-url", candidate.url, "--candidate-policy-url", candidate.policy_url),
        *arguments,
    )


@pytest.fixture(scope="module")
def accepted(fake, script, tmp_path_factory):
    """The folder of an ACCEPT whose flood requests came side by side, by Poisson arrivals."""
    out = tmp_path_factory.mktemp("accepted")
    with fake("--mode", "lru") as lru, fake("--mode", "active") as active:
        done = canary(script, out, lru, active, "--repeats", 2, "--arrivals", 500)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def rejected(fake, script, tmp_path_factory):
    out = tmp_path_factory.mktemp("rejected")
    with fake("--mode", "lru") as lru, fake("--mode", "active", "--fail-at", 50) as active:
        done = canary(script, out, lru, active)
    assert done.returncode == 1, done.stderr
    return out


@pytest.fixture(scope="module")
def unreachable(fake, script, tmp_path_factory):
    out = tmp_path_factory.mktemp("unreachable")
    with fake() as lru:
        pass
    done = canary(script, out, lru, lru)
    assert done.returncode == 2, done.stderr
    return out


def load(out, name="canary.json"):
    return json.loads((out / name).read_text())


@pytest.mark.parametrize("name", ["accepted", "rejected", "unreachable"])
def test_every_outcome_follows_the_schema(request, name):
    record = load(request.getfixturevalue(name))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(record, SCHEMA)


def test_the_schema_would_notice_a_missing_field(accepted):
    record = load(accepted)
    del record["phases"][0]["mode"]
    with pytest.raises(jsonschema.ValidationError, match="'mode' is a required property"):
        jsonschema.validate(record, SCHEMA)


def test_a_server_that_stays_up_never_sees_a_prompt_twice(accepted):
    record = load(accepted)
    seeds = [
        (v["role"], v["report"]["seed"] - record["settings"]["seed"]) for v in record["visits"]
    ]
    assert seeds == [("baseline", 0), ("candidate", 0), ("candidate", 1), ("rollback", 1)]
    assert [phase["hot_prefix"] for phase in record["phases"]] == ["lost", "kept", "kept", "lost"]


def test_a_mode_that_was_not_asked_for_is_inconclusive(fake, script, tmp_path):
    with fake("--mode", "active", "--report-mode", "lru") as candidate, fake() as lru:
        done = canary(script, tmp_path, lru, candidate)
    assert done.returncode == 2, done.stderr
    assert "asked for active, the server reports lru" in load(tmp_path)["reasons"][0]


def test_other_traffic_is_inconclusive(fake, script, tmp_path):
    with fake("--foreign-tokens", 5) as lru, fake("--mode", "active") as active:
        assert canary(script, tmp_path, lru, active).returncode == 2
    assert "other traffic" in load(tmp_path)["reasons"][0]


def test_the_release_record_is_the_canary_in_short(accepted):
    record, release = load(accepted), load(accepted, "release.json")
    assert release["schema"] == "computecache/release"
    for name in ("outcome", "source", "model", "gpu", "image", "final_mode", "scan_limit"):
        assert release[name] == record[name]
    assert release["source"]["commit"] == head()
    assert release["candidate"]["post_flood_cached_tokens"] == 304
    assert release["rollback"]["requests_served"] > 0


def head():
    command = ["git", "-C", str(REPO), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("name", "title", "color"),
    [
        ("accepted", "ACCEPT: active is better here", "#0f766e"),
        ("rejected", "REJECT: stay in lru", "#b91c1c"),
        ("unreachable", "INCONCLUSIVE: could not tell", "#a16207"),
    ],
)
def test_the_page_leads_with_the_verdict_and_loads_nothing(request, name, title, color):
    page = (request.getfixturevalue(name) / "canary.html").read_text()
    assert page.index(title) < page.index("What to do") < page.index("What was checked")
    assert f"background: {color}" in page
    assert "{{" not in page
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [address for address in loaded if not address.startswith("#")] == []
    assert "<script" not in page
    assert "@import" not in page


def browser(page, tmp_path, *arguments):
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: `bash scripts/test.sh` installs it as root"
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --hide-scrollbars"
    return subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", *quiet.split()),
            *(f"--user-data-dir={tmp_path / 'profile'}", *arguments, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


MEASURE = """<script>
addEventListener("load", () => {
  const pictures = [...document.querySelectorAll("figure svg")].map((svg) => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.querySelectorAll("path").length];
  });
  const measured = {
    pictures, page_px: document.documentElement.scrollWidth, window_px: innerWidth,
    heading_px: document.querySelector("h1").getBoundingClientRect().top,
    title: document.querySelector("h1").textContent,
    text: document.body.innerText,
  };
  document.body.textContent = "MEASURED" + JSON.stringify(measured) + "END";
});
</script></body>"""


def measured_in_browser(out, tmp_path, width):
    # The probe goes into a copy: the report itself holds no script.
    page = tmp_path / "probe.html"
    page.write_text((out / "canary.html").read_text().replace("</body>", MEASURE))
    dom = browser(page, tmp_path, f"--window-size={width},900", "--dump-dom")
    text = re.search(r"MEASURED(.*)END", dom, re.DOTALL)[1]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_shows_pictures_and_numbers_within_the_window(accepted, tmp_path, width):
    shown = measured_in_browser(accepted, tmp_path, width)
    assert shown["title"] == "ACCEPT: active is better here"
    assert shown["heading_px"] < 100
    assert shown["page_px"] <= shown["window_px"]
    assert len(shown["pictures"]) == 3
    for picture_width, picture_height, paths in shown["pictures"]:
        assert 0.7 * min(width, 736) < picture_width <= width
        assert picture_height > 50
        assert paths > 5
    for text in (
        "found in the cache by a hot replay: candidate 304, lru 0",
        "one-use prompts since last use",
        "time to first token, ms",
        "share of prompt tokens served from the cache",
        head(),
        "fake",
        "scan limit",
    ):
        assert text in shown["text"]


def test_a_browser_shows_a_report_without_data_too(unreachable, tmp_path):
    shown = measured_in_browser(unreachable, tmp_path, 500)
    assert shown["title"] == "INCONCLUSIVE: could not tell"
    assert shown["pictures"] == []
    assert "Connect" in shown["text"]


def test_text_from_a_server_cannot_become_markup(fake, script, tmp_path):
    with fake("--mode", "lru") as lru, fake("--mode", "<b>active") as candidate:
        assert canary(script, tmp_path, lru, candidate).returncode == 2
    page = (tmp_path / "canary.html").read_text()
    assert "&lt;b&gt;active" in page
    assert "<b>active" not in page


@pytest.mark.parametrize(
    "shape",
    [
        ("--shape", "zipf", "--prefixes", 2, "--hot-tokens", 480, "--max-requests", 80),
        ("--shape", "sessions", "--prefixes", 4, "--turns", 8, "--hot-tokens", 480),
    ],
    ids=lambda shape: shape[1],
)
def test_other_shapes_can_be_judged_too(fake, script, tmp_path, shape):
    with fake("--mode", "lru") as lru, fake("--mode", "active") as active:
        done = canary(script, tmp_path, lru, active, *shape, "--seed", 1)
    record = load(tmp_path)
    jsonschema.validate(record, SCHEMA)
    checks = {check["name"]: check["status"] for check in record["checks"]}
    assert checks["pressure"] == "pass", done.stderr
    assert record["statistics"]["kept_tokens"]["pairs"] == 10
    # 4 sessions in turn fit or do not fit as a whole: no order of eviction helps much there.
    if "zipf" in shape:
        assert done.returncode == 0, done.stderr


def test_a_pool_that_holds_the_whole_stream_tests_nothing(fake, script, tmp_path):
    with fake("--mode", "lru", "--blocks", 9999) as lru, fake("--mode", "active") as active:
        done = canary(script, tmp_path, lru, active, "--shape", "zipf", "--max-requests", 50)
    assert done.returncode == 2
    assert "too little to win" in load(tmp_path)["reasons"][0]
    assert len(load(tmp_path)["phases"]) == 1


@pytest.mark.parametrize(("requests", "hot"), [(41, 2), (58, 4)])
def test_repetitions_that_max_requests_cut_off_decide_nothing(
    fake, script, tmp_path, requests, hot
):
    """The controls of six repetitions come first, so each has a pair; few have a hot replay."""
    with fake("--mode", "lru") as lru, fake("--mode", "active") as active:
        done = canary(script, tmp_path, lru, active, "--max-requests", requests)
    assert done.returncode == 2, done.stderr
    text = (tmp_path / "canary.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    jsonschema.validate(record, SCHEMA)
    checks = {check["name"]: check for check in record["checks"]}
    assert checks["samples"]["status"] == "pass"
    for name in ("kept", "ttft_hot_replay"):
        assert checks[name]["status"] == "unknown"
        assert f"{hot} pairs of repetitions have a hot replay" in checks[name]["detail"]
        assert "5 needed: raise --max-requests" in checks[name]["detail"]
    assert "nan" not in text.lower()
