"""The first words of docstrings: those of functions begin with a verb."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "ostinato"
# Words that cannot begin a sentence of a verb in the imperative and its object.
NO_VERBS = frozenset(
    "A All An As How Of One That The Those What Where Whether Which "
    "TypeError ValueError".split()
)
# Files and folders that are not in line yet.
NOT_YET = ()


def wrong(code: str) -> Iterator[str]:
    """Yield `line: first line of the docstring` for each that begins wrongly."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any("property" in ast.unparse(d) for d in node.decorator_list):
            continue  # a property is described by a noun phrase
        text = ast.get_docstring(node)
        if text and (text[0] == "`" or text.split()[0].strip(",.:;") in NO_VERBS):
            yield f"{node.lineno}: {text.splitlines()[0]}"


def test_docstrings_of_functions_begin_with_a_verb():
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in NOT_YET
        for line in wrong(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["What it does.", "`x`, doubled.", "One, of many."])
def test_another_beginning_is_found(text):
    assert list(wrong(f'def f():\n    """{text}"""')) == [f"1: {text}"]
    assert list(wrong(f'class A:\n    def f(self):\n        """{text}"""'))


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return one of them."""',
        "def f():\n    pass",
        'class A:\n    """The A of all."""',
        'class A:\n    @property\n    def f(self):\n        """The f."""',
        'class A:\n    @ft.cached_property\n    def f(self):\n        """The f."""',
    ],
)
def test_other_docstrings_are_left_alone(code):
    assert list(wrong(code)) == []
