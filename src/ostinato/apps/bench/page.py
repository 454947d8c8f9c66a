"""The page of a run: one HTML file with the picture in it."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from ..wording import counted
from . import machine as machines
from . import results
from .peers import OURS
from .picture import NAMES
from .results import Row

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.ours { font-weight: 600; }
small { color: #666; }
"""


def text(rows: Sequence[Row], machine: dict[str, Any], picture: bytes) -> str:
    """Return the page, which needs no other file and no network."""
    problems = [row.problem for row in rows]
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items())
    facts = [
        f"{machine['cpu']}, {counted(machine['threads'], 'thread')}, "
        f"{machine['system']}",
        f"Backend cpu: {machine['native']}",
        f"Python {machine['python']}, {packages}",
        f"Measured on {machine['date']}",
    ]
    if warning := machines.busy(machine):
        facts.append(warning.capitalize())
    left_out = results.reasons(rows)
    encoded = base64.b64encode(picture).decode()
    parts = [
        "<h1>ostinato bench</h1>",
        _list(facts),
        f'<p><img src="data:image/png;base64,{encoded}" '
        'alt="Bars: milliseconds of each contender; the table has the numbers"></p>',
        f"<h2>Milliseconds a call: {escape(results.common(problems))}</h2>",
        _table(rows),
        "<p>Each number is the median of several rounds, in which all contenders take "
        "turns; in brackets its ratio to ostinato's. ± is half the distance of the "
        "quartiles. N is the number of sequences, T of steps, H of units and of "
        "inputs. Training is a forward pass with the gradients of input, initial state "
        "and weights.</p>",
        "<p>Before it was timed, every contender's results were compared with those of "
        f"a loop of <code>lax.scan</code>; they agree up to {_worst(rows)} of the "
        "largest element.</p>",
    ]
    if left_out:
        parts += ["<h2>Left out</h2>", _list(left_out)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>ostinato bench</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _table(rows: Sequence[Row]) -> str:
    names = results.contenders(rows)
    problems = [row.problem for row in rows]
    heads = "".join(f"<th>{escape(NAMES.get(name, name))}</th>" for name in names)
    lines = []
    for row in rows:
        cells = [f"<td>{escape(results.label(row.problem, problems))}</td>"]
        cells += [_cell(row, name) for name in names]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="wide"><table>\n<tr><th></th>{heads}</tr>\n'
        + "\n".join(lines)
        + "\n</table></div>"
    )


def _cell(row: Row, name: str) -> str:
    if name == OURS:
        return f'<td class="ours">{escape(results.ours(row))}</td>'
    if name not in row.seconds:
        return "<td></td>"
    time = results.milliseconds(row.median(name))
    return f"<td>{time} <small>({results.times(row.ratio(name))}x)</small></td>"


def _worst(rows: Sequence[Row]) -> str:
    return f"{max(max(row.differences.values()) for row in rows):.1e}"
