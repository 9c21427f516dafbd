"""Tables of the benchmark: whose column is whose, and which direction is better."""

from __future__ import annotations

from bench.report import as_json, detailed, no_samples, summary
from bench.suites.spark import SPARK


def test_a_pairs_columns_are_named_after_its_sides() -> None:
    samples = no_samples()
    ours, other = SPARK.sides
    samples["sink: batch rows/s"][ours] += [80.0, 100.0, 90.0]
    samples["sink: batch rows/s"][other] += [100.0]
    samples["sink: time of all ms"][ours] += [30.0]
    samples["sink: time of all ms"][other] += [60.0]
    result = as_json(1, {"spark": samples})
    lines = detailed(result["spark"], SPARK.sides).splitlines()
    assert lines[2] == '| figure | format("fencepost") | Spark\'s connector | ratio |'
    assert lines[4] == "| sink: batch rows/s | 90.0 (80.0 – 100.0) | 100.0 | 0.90 |"
    assert lines[5] == "| sink: time of all ms | 30.0 | 60.0 | 2.00 |", "less time is better"


def test_the_first_page_compares_brokers_alone() -> None:
    pair, brokers = no_samples(), no_samples()
    for side in SPARK.sides:
        pair["a pair: rows/s"][side].append(1.0)
    for side in ("fencepost", "kafka"):
        brokers["both brokers: rows/s"][side].append(1.0)
    text = summary(as_json(1, {"spark": pair, "data": brokers}))
    assert "both brokers" in text
    assert "a pair" not in text
