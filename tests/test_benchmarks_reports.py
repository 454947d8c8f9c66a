"""The files, tables and pages of benchmarks."""

import json
from pathlib import Path

import pytest
from benchmark_rows import made_results, made_row

from benchmarks import (
    compare,
    headline,
    heads,
    layers,
    linear,
    long,
    ragged_report,
    recurrent,
    report,
    results,
    step_peers,
    streams,
)
from ostinato import _config
from ostinato.apps.bench.peers import OURS

pytestmark = pytest.mark.usefixtures("jax_as_it_comes")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def measured():
    return made_results()


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
    measured.machine.update(cpu="AMD EPYC", family="25", isa="avx512")
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
    older = picture.with_name("cost_T_amd.png")  # of a sweep that these lack
    older.touch()
    report.main(tmp_path / "results.json", docs=tmp_path)
    assert older.name in page.read_text() and not older.read_bytes()


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


def test_processors_that_are_much_faster_or_slower_have_tables_of_their_own():
    machine = {"cpu": "AMD EPYC", "isa": "avx2"}
    assert results.kind_of(machine) == "AMD-AVX2"
    assert results.kind_of(machine | {"isa": "avx512"}) == "AMD"
    assert results.kind_of({"cpu": "Some Xeon"}) == "Some"
    zen_5 = {"cpu": "AMD EPYC", "isa": "avx512_bf16", "family": "26"}
    assert results.kind_of(zen_5) == "AMD-Zen5"
    assert results.kind_of(zen_5 | {"family": "25"}) == "AMD"


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
    goals = [report.MARK, ragged_report.MARK]
    others = (recurrent, step_peers, heads, layers, linear, long, streams)
    marks = [*goals, *(module.MARK for module in others)]
    for name, wanted in ((report.RESULTS, marks), (report.GOALS, goals)):
        page = (ROOT / "docs" / name).read_text()
        for mark in wanted:
            for vendor in results.VENDORS:
                assert report.between_marks(page, "new", f"{mark} {vendor}") != page


def test_readme_repeats_the_measured_rows():
    found = headline.read((ROOT / "docs" / "results.md").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())  # lines break anywhere
    equal, different = (
        found["GRU, training"],
        found["GRU, training,\ndifferent lengths"],
    )
    assert f"PyTorch {equal['torch']:.1f} times" in readme
    assert f"`lax.scan` {equal['scan']:.1f} times" in readme
    assert f"{different['torch']:.1f} and {different['scan']:.1f} times" in readme


def test_headline_wants_its_rows():
    with pytest.raises(ValueError, match="lacks the row"):
        headline.read("#### GRU\n\n| row | torch |\n| --- | --- |\n| other | 1 |\n")


def test_headline_is_that_of_the_first_vendor():
    """Also where a table has a mark right behind it."""
    page = (ROOT / "docs" / "results.md").read_text()
    begin, end = (f"<!-- {report.MARK} AMD: {e} -->" for e in ("begin", "end"))
    amd = page.partition(begin)[2].partition(end)[0]
    assert headline.read(page) == headline.read(amd)
    tables = [part.split("\n\n")[1] for part in amd.split("#### ")[1:4]]
    named = zip(("LSTM", "GRU", "RNN, tanh"), tables, strict=True)
    alone = "".join(f"#### {n}\n\n{table}\n<!-- end -->\n" for n, table in named)
    assert headline.read(alone) == headline.read(amd)


def test_headline_draws_a_bar_for_each_peer():
    pytest.importorskip("matplotlib")
    found = headline.read((ROOT / "docs" / "results.md").read_text())
    (axes,) = headline.draw(found).axes
    assert len(axes.patches) == len(headline.CHOSEN) * len(headline.PEERS)


def test_report_wants_marks():
    with pytest.raises(ValueError, match="lacks the marks"):
        report.between_marks("a page", "text", report.MARK)
