"""The files, tables and pages of benchmarks."""

import itertools
import json
from pathlib import Path

import jax
import pytest

from benchmarks import (
    compare,
    floors,
    headline,
    layers,
    linear,
    ragged_report,
    recurrent,
    report,
    results,
    rows,
)
from benchmarks.results import Results, Row
from ostinato import _config
from ostinato.apps.bench.peers import OURS
from ostinato.apps.bench.problem import Problem

ROOT = Path(__file__).parents[1]


SMALL = dict(batch=3, steps=5, input_size=6, hidden_size=7)


RAGGED = SMALL | dict(ragged=True, bidirectional=True)


STEP = SMALL | dict(batch=1, steps=1)


BFLOAT16 = SMALL | dict(dtype="bfloat16")


GRADIENTS = (OURS, "torch", "flax")


DEEP = RAGGED | dict(num_layers=2)


TAKE_PART = [
    *itertools.product(rows.MODES, ["infer"], [RAGGED], ["torch", "onnxruntime"]),
    *itertools.product(["gru", "rnn_tanh"], ["train"], [RAGGED], GRADIENTS),
    *itertools.product(["lstm"], ["train"], [DEEP], GRADIENTS),
    *itertools.product(rows.MODES, ["step"], [STEP], results.CONTENDERS),
    *itertools.product(["lstm"], ["infer"], [BFLOAT16], [*GRADIENTS, "scan"]),
    ("lstm", "compile", SMALL, OURS),
]


TAKE_PART = [
    pytest.param(name, Problem(mode, kind, **sizes), id=f"{name}-{mode}-{kind}")
    for mode, kind, sizes, name in TAKE_PART
]


@pytest.fixture(autouse=True)
def _jax_as_it_comes():
    """Restore JAX's defaults, since the peers are not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


PEAKS = floors.Peaks(
    threads=2,
    float32=2e11,
    bfloat16=4e11,
    read=[(2**14, 4e11), (2**20, 2e11), (2**26, 4e10)],
    dispatch=1e-5,
)


def made_row(name, ours, threads=2, mode="lstm", **sizes):
    """Make a row with rounds 1 % apart, torch 1.5 and scan 3 times as long."""
    around = [0.99, 1.0, 1.01]
    seconds = {OURS: ours, "torch": 1.5 * ours, "scan": 3 * ours}
    return Row(
        mode=mode,
        name=name,
        sizes=dict(T=100, N=32, H=256) | sizes,
        threads=threads,
        seconds={name: [s * a for a in around] for name, s in seconds.items()},
        skipped={"flax": "needs the package flax"},
        detail={OURS: "cpu"},
        floor=0.9 * ours,
    )


@pytest.fixture
def measured():
    made = [
        made_row(f"N{n}H256-{kind}", n * times, N=n)
        for n in (1, 32, 128)
        for kind, times in (("infer", 5e-4), ("train", 2e-3))
    ]
    made.append(made_row("N32H256-infer", 3e-2, threads=1))
    made.append(made_row("N1H64-step", 2e-5, mode="gru", N=1, H=64))
    peaks = {"2": PEAKS._asdict()}
    machine = results.machine() | {"peaks": peaks, "kernel_shares": {"f32": 0.97}}
    return Results(machine, {row.id: row for row in made})


def test_results_are_stored(tmp_path, measured):
    path = tmp_path / "new" / "results.json"
    results.save(path, measured)
    stored = results.load(path)
    assert stored.rows == measured.rows and stored.threads == 2
    assert stored.machine == json.loads(json.dumps(measured.machine))


def test_verdict_names_what_was_missed():
    row = made_row("N32H256-infer", 1e-2)
    verdict = report.tables.verdict
    assert verdict(row) == "ok"
    assert verdict(row._replace(floor=7e-3)) == "missed: floor"
    slow = row._replace(seconds=row.seconds | {"torch": [1e-2], "scan": [9e-3]})
    assert verdict(slow) == "missed: torch, scan"
    assert verdict(row._replace(name="N8H256-infer")) == ""
    built = row._replace(name="N32H256-compile", floor=None)
    assert verdict(built) == "ok"
    slowly = built._replace(seconds={OURS: [0.07]})
    assert verdict(slowly) == "missed: 60 ms"


def test_comparison_needs_more_than_the_spread():
    before = made_row("N32H256-infer", 1e-2)
    for change, verdict in ((1.0, "same"), (1.005, "same"), (1.1, "slower")):
        after = made_row("N32H256-infer", 1e-2 * change)
        assert compare.verdict(before, after) == verdict
        assert compare.change(before, after) == pytest.approx(change)
    assert compare.verdict(before, made_row("N32H256-infer", 8e-3)) == "faster"


def test_comparison_is_printed(tmp_path, measured, capsys):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path in paths:
        results.save(path, measured)
    compare.main(*paths)
    assert "lstm/N32H256-infer/2 threads" in capsys.readouterr().out


def test_report_fills_the_page(tmp_path, measured):
    pytest.importorskip("matplotlib")
    page, goals = empty_pages(tmp_path)
    measured.machine["cpu"] = "AMD EPYC"
    results.save(tmp_path / "results.json", measured)
    report.main(tmp_path / "results.json", docs=tmp_path)
    text = page.read_text()
    assert text.startswith("Top\n") and text.endswith("Bottom\n")
    assert "old AMD" not in text and "old Intel" in text
    assert "| N32H256-infer | 16.0 ± 1 % | 1.50 | 3.00 |" in text
    assert "#### GRU" in text and "flax |" not in text  # it was not run
    wanted = "| N32H256-infer | 14.4 | 1.11 | 1.50 | 1.04 | 1.12 | ok |"
    assert wanted in goals.read_text() and "f32 97 %" in goals.read_text()
    assert "floor" not in text and "must" not in text
    picture = tmp_path / "images" / "cost_N_amd.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.name in text
    assert [path.name for path in picture.parent.iterdir()] == [picture.name]
    report.main(tmp_path / "results.json", docs=tmp_path)
    assert page.read_text() == text


def empty_pages(folder: Path) -> list[Path]:
    """Write pages with marks of every vendor, and old text between them."""
    pages = [folder / name for name in (report.RESULTS, report.GOALS)]
    for page in pages:
        page.parent.mkdir(exist_ok=True)
        page.write_text(empty_page())
    return pages


def empty_page() -> str:
    parts = ["Top"]
    for vendor in results.VENDORS:
        begin, end = (f"<!-- {report.MARK} {vendor}: {e} -->" for e in ("begin", "end"))
        parts += [begin, f"old {vendor}", end]
    return "\n".join([*parts, "Bottom", ""])


def test_every_vendor_has_a_table_of_its_own(tmp_path, measured):
    pytest.importorskip("matplotlib")
    page, _ = empty_pages(tmp_path)
    for vendor, cpu in zip(
        results.VENDORS, ("AMD EPYC", "Intel(R) Xeon(R)"), strict=True
    ):
        measured.machine.update(cpu=cpu, family="6", model="143", isa="avx512_amx")
        results.save(tmp_path / "results.json", measured)
        report.main(tmp_path / "results.json", docs=tmp_path)
        assert f"on {cpu} (family 6, model 143), avx512_amx, " in page.read_text()
        assert f"old {vendor}" not in page.read_text()
        assert (tmp_path / "images" / f"cost_N_{vendor.lower()}.png").exists()
        if vendor == results.VENDORS[0]:
            assert f"old {results.VENDORS[1]}" in page.read_text()
    assert "on AMD EPYC (family 6" in page.read_text()  # the first one is kept


def test_tables_name_the_processor(tmp_path, measured, capsys):
    assert measured.machine["isa"] in (*_config.CPU_ISAS, None)
    measured.machine["cpu"] = "Some Xeon"
    named = results.cpu_of(measured.machine)
    assert named.startswith("Some Xeon")
    console = report.tables.console()
    console.print(report.tables.rich_table(measured.rows.values(), measured.machine))
    results.save(tmp_path / "a.json", measured)
    compare.main(tmp_path / "a.json", tmp_path / "a.json")
    assert capsys.readouterr().out.count("Some Xeon") == 2
    before = {"cpu": "Some Xeon"}  # as in a file without the other keys
    assert results.cpu_of(before) == "Some Xeon"


def test_pages_have_marks_of_every_vendor():
    marks = [report.MARK, recurrent.MARK, ragged_report.MARK, layers.MARK, linear.MARK]
    for name, wanted in ((report.RESULTS, marks), (report.GOALS, marks[:3:2])):
        page = (ROOT / "docs" / name).read_text()
        for mark in wanted:
            for vendor in results.VENDORS:
                assert report.between_marks(page, "new", f"{mark} {vendor}") != page


def test_readme_repeats_the_measured_rows():
    found = headline.read((ROOT / "docs" / "results.md").read_text())
    readme = (ROOT / "README.md").read_text()
    equal, different = (
        found["GRU, training"],
        found["GRU, training,\ndifferent lengths"],
    )
    for peer in ("torch", "scan"):
        assert (
            f"{equal[peer]:.1f}" in readme and f"{different[peer]:.1f} times" in readme
        )


def test_headline_wants_its_rows():
    with pytest.raises(ValueError, match="lacks the row"):
        headline.read("#### GRU\n\n| row | torch |\n| --- | --- |\n| other | 1 |\n")


def test_headline_draws_a_bar_for_each_peer():
    pytest.importorskip("matplotlib")
    found = headline.read((ROOT / "docs" / "results.md").read_text())
    (axes,) = headline.draw(found).axes
    assert len(axes.patches) == len(headline.CHOSEN) * len(headline.PEERS)


def test_report_wants_marks():
    with pytest.raises(ValueError, match="lacks the marks"):
        report.between_marks("a page", "text", report.MARK)
