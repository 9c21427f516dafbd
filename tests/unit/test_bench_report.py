"""Tables of the benchmark: the order of the columns, and the direction that is better."""

from __future__ import annotations

from bench.report import STALL, as_json, detailed, no_samples, summary, take
from bench.suites.spark import SPARK


def test_benchmark_columns_are_named_after_the_compared_sides() -> None:
    samples = no_samples()
    ours, other = SPARK.sides
    samples["sink: throughput (rows/s)"][ours] += [80.0, 100.0, 90.0]
    samples["sink: throughput (rows/s)"][other] += [100.0]
    samples["sink: total time (ms)"][ours] += [30.0]
    samples["sink: total time (ms)"][other] += [60.0]
    result = as_json(1, {"spark": samples})
    lines = detailed(result["spark"], SPARK.sides).splitlines()
    head = '| measurement | unit | format("fencepost") | Spark\'s connector | ratio |'
    assert lines[2] == head
    assert lines[4] == "| sink: throughput | rows/s | 90.0 (80.0 – 100.0) | 100.0 | 0.90 |"
    assert lines[5] == "| sink: total time | ms | 30.0 | 60.0 | 2.00 |", "less time is better"


def test_benchmark_summary_compares_only_brokers() -> None:
    pair, brokers = no_samples(), no_samples()
    for side in SPARK.sides:
        pair["a pair: throughput (rows/s)"][side].append(1.0)
    for side in ("fencepost", "kafka"):
        brokers["both brokers: throughput (rows/s)"][side].append(1.0)
    text = summary(as_json(1, {"spark": pair, "data": brokers}))
    assert "both brokers" in text
    assert "a pair" not in text


def test_suite_reports_the_worst_stall_of_its_workloads() -> None:
    samples = no_samples()
    for number, stalls in enumerate([(3.0, 9.0, 4.0), (2.0, 1.0, 8.0)]):
        for workload, stall in zip("abc", stalls, strict=True):
            for side, factor in (("fencepost", 1), ("kafka", 10)):
                figures = {"rate (requests/s)": 5.0, STALL: stall * factor}
                take(samples, number, workload, side, figures)
    assert samples[STALL] == {"fencepost": [9.0, 8.0], "kafka": [90.0, 80.0]}
    assert samples["a: rate (requests/s)"] == {"fencepost": [5.0, 5.0], "kafka": [5.0, 5.0]}
