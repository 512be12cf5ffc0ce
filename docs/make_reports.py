"""Writes `reports.md`: reported faults, and the tests that hold them.

python docs/make_reports.py
"""

import ast
import pathlib
import tomllib

DOCS = pathlib.Path(__file__).parent
HEAD = """# Reported faults

What goes wrong for users of batch normalization, in any library, and the tests that see
to it here. Only what has a test is claimed, {held} of {all} rows. This page is made by
`docs/make_reports.py` from the markers of the tests.

| row | what goes wrong | held by |
| --- | --- | --- |
"""


def read_markers(path: pathlib.Path) -> dict[str, list[int]]:
    """Returns the rows that each test of a file holds, by its `file::name`.

    Raises:
      ValueError: A marker is on something that is no test, or will not be run.
    """
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        markers = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
        rows = [m for m in markers if m.startswith("pytest.mark.report(")]
        if not rows:
            continue
        name = f"{path.name}::{node.name}"
        if not name.partition("::")[2].startswith("test_"):
            raise ValueError(f"{name} is marked but is no test.")
        if any(word in m for m in markers for word in (".skip", ".xfail")):
            raise ValueError(f"{name} is marked as holding {rows} but may not pass.")
        numbers = ast.literal_eval(rows[0].removeprefix("pytest.mark.report"))
        found[name] = list(numbers) if isinstance(numbers, tuple) else [numbers]
    return found


def make_page(faults: dict[int, str], tests: dict[str, list[int]]) -> str:
    """Returns the page, the same whatever the order of its arguments.

    Raises:
      ValueError: A test holds a row that there is not.
    """
    unknown = {name: set(rows) - set(faults) for name, rows in tests.items()}
    if any(unknown.values()):
        wrong = {name: rows for name, rows in unknown.items() if rows}
        raise ValueError(f"reports.toml has no such rows: {wrong}")
    held = {
        row: sorted(t for t, rows in tests.items() if row in rows) for row in faults
    }
    lines = [
        f"| {row} | {faults[row]} | {'<br>'.join(f'`{t}`' for t in held[row]) or '–'} |"
        for row in sorted(faults)
    ]
    number = sum(map(bool, held.values()))
    return HEAD.format(held=number, all=len(faults)) + "\n".join(lines) + "\n"


def read_page() -> str:
    """Returns the page as the repository's files say."""
    texts = tomllib.loads((DOCS / "reports.toml").read_text())
    tests: dict[str, list[int]] = {}
    for path in sorted((DOCS.parent / "tests").glob("test_*.py")):
        tests |= read_markers(path)
    return make_page({int(row): text for row, text in texts.items()}, tests)


if __name__ == "__main__":
    (DOCS / "reports.md").write_text(read_page())
