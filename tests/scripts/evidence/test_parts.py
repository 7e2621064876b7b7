# SPDX-License-Identifier: Apache-2.0
"""What the parts count: samples, slices of a trace, the time of a decoding step."""

import json
import math

import pytest

from evidence.parts import cost
from evidence.parts.agents import speed_for
from evidence.parts.trace import trace_slice
from evidence.samples import COLUMNS, Sample, median_ttft_ms, samples
from serving.metrics import MetricsError
from serving.requests import Request, Result, WorkloadError
from serving.traces import TraceRow


def test_a_row_of_samples_has_a_value_for_each_column():
    result = Result(Request("hot", [1] * 40), ttft_ms=7.12345, total_ms=9.0, cached_tokens=16)
    (sample,) = samples([result])
    assert dict(zip(COLUMNS, json.loads(json.dumps(sample)), strict=True)) == {
        "kind": "hot",
        "ttft_ms": 7.123,
        "total_ms": 9.0,
        "prompt_tokens": 40,
        "cached_tokens": 16,
    }


def test_a_request_without_usage_is_no_sample():
    with pytest.raises(WorkloadError, match="a hot request has no times or no cached tokens"):
        samples([Result(Request("hot", [1]), ttft_ms=1.0, total_ms=2.0)])


def test_the_median_of_samples_is_the_upper_one_of_two():
    rows = [Sample("hot", ms, ms, 1, 0) for ms in (3.0, 1.0, 2.0, 4.0)]
    assert median_ttft_ms(rows) == 3.0
    assert median_ttft_ms(rows[:3]) == 2.0
    assert math.isnan(median_ttft_ms([]))


def row(at_ms, ids):
    return TraceRow(at_ms, 512 * ids, 1, list(range(ids)), 512)


def test_a_trace_slice_is_as_long_as_the_time_allows():
    rows = [row(1000 * i, 10) for i in range(100)]
    taken, faster = trace_slice(rows, block_tokens=10, tokens_per_s=500, load=0.5, cell_s=10)
    assert len(taken) == 25  # 100 tokens each, 250 tokens a second, 10 seconds
    assert faster == pytest.approx(2.4)


def test_a_trace_slice_is_never_empty():
    taken, faster = trace_slice([row(0, 99), row(9, 99)], 512, 10, 0.5, 1)
    assert len(taken) == 1
    assert faster > 0


def test_arrivals_of_agents_are_as_many_a_second_as_asked_for():
    rows = [row(at_ms, 4) for at_ms in (0, 100, 5000, 9000)]  # 3 gaps in 9 s
    assert speed_for(rows, requests_per_s=1.0) == pytest.approx(3.0)
    assert speed_for(rows[:1], requests_per_s=1.0) > 0


METRICS = """\
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{{engine="0",le="+Inf"}} {count}
vllm:request_decode_time_seconds_sum{{engine="0"}} {seconds}
vllm:request_decode_time_seconds_count{{engine="0"}} {count}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} 7
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 0
"""


def test_a_decoding_steps_time_is_the_engines_own():
    before = cost.metric_sums(METRICS.format(seconds=10.0, count=4), cost.DECODE)
    after = cost.metric_sums(METRICS.format(seconds=12.0, count=14), cost.DECODE)
    assert cost.decode_step_ms(before, after, max_tokens=21) == pytest.approx(10.0)


def test_an_absent_series_is_an_error():
    with pytest.raises(MetricsError, match="num_preemptions_total"):
        cost.metric_sums("# TYPE vllm:x counter\nvllm:x_total 1\n", cost.DECODE)
