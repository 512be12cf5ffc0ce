"""The table of reported faults claims what tests hold, and nothing else."""

import pathlib
import runpy

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "make_reports.py"))


def markers(tmp_path, source):
    path = tmp_path / "test_some.py"
    path.write_text(source)
    return SCRIPT["read_markers"](path)


def test_the_page_is_what_the_markers_say():
    page = (DOCS / "reports.md").read_text()
    assert page == SCRIPT["read_page"](), "run: python docs/make_reports.py"


def test_a_marker_gives_its_rows_and_other_tests_none(tmp_path):
    source = (
        "@pytest.mark.report(3, 4)\n@other\ndef test_a(): ...\n\n"
        "@pytest.mark.report(5)\ndef test_b(): ...\n\n"
        "@pytest.mark.slow\ndef test_c(): ...\n"
    )
    right = {"test_some.py::test_a": [3, 4], "test_some.py::test_b": [5]}
    assert markers(tmp_path, source) == right


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def helper(): ...", "helper is marked but is no test"),
        ("@pytest.mark.skip\ndef test_a(): ...", "may not pass"),
        ("@pytest.mark.xfail(strict=True)\ndef test_a(): ...", "may not pass"),
    ],
)
def test_a_marker_where_nothing_is_held_is_an_error(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        markers(tmp_path, f"@pytest.mark.report(1)\n{source}\n")


def test_an_unknown_row_is_an_error():
    with pytest.raises(ValueError, match=r"no such rows: \{'a': \{3\}\}"):
        SCRIPT["make_page"]({1: "One."}, {"a": [1, 3]})


def test_a_row_without_a_test_claims_none():
    page = SCRIPT["make_page"]({2: "Two.", 1: "One."}, {"b": [2], "a": [2]})
    assert page.endswith("| 1 | One. | – |\n| 2 | Two. | `a`<br>`b` |\n")
    assert "1 of 2 rows" in page
