"""`python -m benchmarks NAME`: runs one comparison and prints its table."""

import argparse
import importlib
import pathlib
import sys

NAMES = ("accuracy", "main_job")


def main() -> None:
    """Runs the comparison that the command line names; fails where it has faults."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    options = parser.parse_args()
    comparison = importlib.import_module(f"benchmarks.{options.name}")
    table = comparison.run()
    print(table)
    if faults := getattr(comparison, "faults", list)():
        sys.exit("\n".join(["", *faults]))
    if options.write:
        write(pathlib.Path("README.md"), options.name, table)


def write(path: pathlib.Path, name: str, table: str) -> None:
    """Replaces what stands between the marks of `name` in a text."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = path.read_text()
    before, rest = text.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
