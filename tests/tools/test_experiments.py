# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest

import experiments
import make_trace


def test_every_experiment_fits_the_policy_and_all_names_differ():
    names = [experiment.name for experiment in experiments.EXPERIMENTS]
    assert len(set(names)) == len(names)
    for experiment in experiments.EXPERIMENTS:
        experiments.load("changed_policy", experiment)


def test_a_rule_or_constant_that_is_gone_is_named():
    policy = SimpleNamespace(Guard=object)
    with pytest.raises(ValueError, match=r"no Guard\.settle"):
        experiments.rule("Guard", "settle", lambda policy, old: old)(policy)
    with pytest.raises(ValueError, match="no GUARD_PRIOR"):
        experiments.constant("GUARD_PRIOR", 0.0)(policy)


def test_a_changed_rule_is_what_is_replayed(tmp_path):
    trace = tmp_path / "chat.jsonl"
    trace.write_bytes(make_trace.to_jsonl(make_trace.make_trace("chat", 2, 120)))
    options = [str(trace), "--capacity", "200", "--mode", "active", "--workers", "1"]
    demoted = {
        experiment.name: experiments.replay(experiment, options, tmp_path)[0]["counters"][
            "demoted_blocks"
        ]
        for experiment in experiments.EXPERIMENTS
        if experiment.name in ("as_it_is", "never_demote")
    }
    assert demoted["as_it_is"] > demoted["never_demote"] == 0


def test_a_replay_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError, match=r"absent\.jsonl"):
        experiments.replay(experiments.EXPERIMENTS[0], [str(tmp_path / "absent.jsonl")], tmp_path)


def test_the_table_has_a_line_for_each_row():
    row = {"what": "w", "predicted": "p", "kept": False, "scan_limit": 64}
    row["points_over_lru"] = {"one": [1.0, -1.0], "two": [3.0]}
    text = experiments.table([json.loads(json.dumps(row))])
    assert "| w | p | +0.00 (-1.00) | +3.00 (+3.00) | +1.00 | -1.00 | no |" in text
