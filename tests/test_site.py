"""Tests of the pages that mkdocs builds: they are rendered as they were meant."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 88  # of a signature, in characters
FOUND = ("flax", "equinox", "keras", "torch", "GPU", "migration")


def text_of(fragment: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", fragment)).strip()


def faults(page: str) -> Iterator[str]:
    """Yield what is wrong on an HTML page of the reference."""
    if "<blockquote" in page:
        yield "an example became a quotation"
    for paragraph in re.findall(r"<p>(.*?)</p>", page, re.S):
        text = text_of(paragraph)
        if re.match(r">>>|from [\w.]+ import |import \w+$", text):
            yield f"code became a paragraph: {text}"
        if "`" in text:
            yield f"a backtick was left over: {text}"
    for section in re.split(r'<span class="doc-section-title">Returns:', page)[1:]:
        items = section.partition("</ul>")[0].count("doc-section-item")
        if items != 1:
            yield f"a result was split into {items}: {text_of(section)[:80]}"
    for code in re.findall(r'<div class="doc-signature.*?</pre>', page, re.S):
        for line in text_of(code).splitlines():
            if len(line) > WIDTH:
                yield f"a signature is too long: {line}"
    for name in re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"', page):
        yield f"the page needs a network: {name}"


@pytest.mark.parametrize(
    "page, fault",
    [
        ("<blockquote><p>a</p></blockquote>", "quotation"),
        ("<p>from ostinato import ragged</p>", "became a paragraph"),
        ("<p>&gt;&gt;&gt; f(x)</p>", "became a paragraph"),
        ("<p>a <code>b</code> `c`</p>", "backtick"),
        (
            '<span class="doc-section-title">Returns:</span>'
            '<ul><li class="doc-section-item">a</li>'
            '<li class="doc-section-item">b</li></ul>',
            "split into 2",
        ),
        (f'<div class="doc-signature"><pre>f({"a, " * 40})</pre>', "too long"),
        ('<script src="https://cdn.org/math.js">', "network"),
    ],
)
def test_a_fault_is_found(page, fault):
    assert [fault in found for found in faults(page)] == [True]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs, from the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        folder,
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_reference_is_rendered_without_faults(site):
    pages = sorted((site / "api").rglob("index.html"))
    assert len(pages) == len(list((ROOT / "docs" / "api").glob("*.md")))
    found = [
        f"{page.parent.name}: {fault}"
        for page in pages
        for fault in faults(page.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_classes_have_signatures(site):
    page = (site / "api" / "operator" / "index.html").read_text(encoding="utf-8")
    signatures = re.findall(r'<div class="doc-signature.*?</pre>', page, re.S)
    names = {text_of(code).partition("(")[0] for code in signatures}
    assert {"RNNSpec", "RNNOutput", "rnn", "rnn_step"} <= names


def test_search_finds_what_people_look_for(site):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    for word in FOUND:
        wanted = re.compile(rf"\b{word}\b", re.I)
        found = {
            entry["location"].partition("#")[0]
            for entry in index["docs"]
            if wanted.search(f"{entry['title']} {text_of(entry['text'])}")
        }
        assert found, word
        assert any(page.startswith(("migration", "support")) for page in found), word
