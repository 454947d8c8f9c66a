"""Tests of the benchmark of `ragged.vmap`: contenders agree, reports are correct."""

import itertools
import json

import jax
import pytest

from benchmarks import ragged, ragged_models, ragged_report, report
from benchmarks.ragged_models import MODELS

MARKED = "before\n<!-- ragged AMD: begin -->\nold\n<!-- ragged AMD: end -->\nafter\n"


@pytest.fixture(autouse=True)
def _jax_as_it_comes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name, kind", [("pool", "train"), ("all", "infer")])
def test_both_forms_of_a_model_agree(name, kind):
    data = ragged_models.make_data(2.0, batch=8, longest=20)
    row = ragged.measure(name, kind, data, rounds=1, compile_too=False)
    assert row["padding_ratio"] == pytest.approx(2.0, abs=0.2)
    assert {k: len(v) for k, v in row["seconds"].items()} == {"ragged": 1, "padded": 1}


def test_lengths_have_the_mean_and_the_longest():
    lengths = ragged_models.draw_lengths(200 / 5.3, 256, 200)
    assert lengths.mean() == pytest.approx(200 / 5.3, rel=0.01)
    assert (lengths.min(), lengths.max()) == (ragged_models.SHORTEST, 200)


def make_rows():
    """Make rows as if cost were proportional to the padded steps."""
    for ratio, name, kind in itertools.product((1.0, 5.3), MODELS, ragged.KINDS):
        yield {
            "ratio": ratio,
            "model": name,
            "kind": kind,
            "padding_ratio": ratio,
            "seconds": {"ragged": [0.01], "padded": [0.01 * ratio]},
            "compile_seconds": {"ragged": [0.3], "padded": [0.2]},
        }


def test_report_replaces_the_table_and_draws_the_picture(tmp_path):
    machine = {"date": "today", "cpu": "AMD EPYC", "cpus": 2, "packages": {"jax": "1"}}
    measured = {"machine": machine, "rows": list(make_rows())}
    page, goals = (tmp_path / name for name in (report.RESULTS, report.GOALS))
    goals.parent.mkdir()
    page.write_text(MARKED)
    goals.write_text(MARKED)
    ragged_report.write(json.loads(json.dumps(measured)), tmp_path, 5.3)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text
    assert "| MLP | 10.0 | 53.0 | 5.30 | 10.0 | 53.0 | 5.30 | 1.5 / 1.5 |" in text
    assert "| MLP | 5.30 | 5 | 5.30 | 4.5 |" in goals.read_text()
    assert len([line for line in text.split("\n") if line.startswith("| ")]) == (
        len(MODELS) + 2
    )
    assert (tmp_path / "images" / "ragged_amd.png").stat().st_size > 10_000
