# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools/bench_scrape.py"


@pytest.mark.server
def test_short_run_scrapes_a_deciding_policy_and_reports(tmp_path):
    options = ["--rounds", "2", "--round-s", "0.3", "--scrapes-per-s", "50"]
    result = subprocess.run(
        [sys.executable, BENCH, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # So short a run may well be judged wrongly; what it counts must be there.
    assert result.returncode in (0, 1), result.stderr
    report = json.loads(result.stdout)
    assert report["scrapes"] > 2
    assert report["decisions"] > 100
    assert report["us_per_allocation"]["scraped"]["median"] > 1
    assert report["accepted"] == (result.returncode == 0)


def test_no_patched_vllm_is_exit_code_2(tmp_path):
    options = ["--rounds", "2", "--round-s", "0.1"]
    code = "import sys; sys.modules['vllm'] = None; sys.path.insert(0, sys.argv[1]); "
    code += "import bench_scrape; sys.exit(bench_scrape.main(sys.argv[2:]))"
    result = subprocess.run(
        [sys.executable, "-c", code, BENCH.parent, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "bench_scrape: vLLM cannot be imported" in result.stderr


@pytest.mark.parametrize("option", ["--round-s=nan", "--round-s=inf", "--scrapes-per-s=nan"])
def test_a_number_without_a_meaning_is_exit_code_2(option):
    command = [sys.executable, BENCH, option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "above 0, at most 1000" in done.stderr
