"""Runs Flax's own tests with its BatchNorm replaced by ours.

    python tests/flax_suite.py PATH_OF_A_FLAX_CHECKOUT

The checkout should be of the installed version. As a pytest plugin it swaps the classes
before the tests are imported, and skips those that make no BatchNorm.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import flax.linen
import flax.nnx
import pytest

import bnjax.linen
import bnjax.nnx

# They pin the biased running variance (m = 12 and less).
BIASED = [
    f"linen/linen_test.py::NormalizationTest::test_batch_norm{kind}{number}"
    for kind in ("", "_complex")
    for number in (0, 1)
]
FILES = [
    "linen/linen_test.py",
    "linen/linen_transforms_test.py",
    "linen/linen_module_test.py",
    "linen/summary_test.py",
    "nnx/transforms_test.py",
    "nnx/nn/normalization_test.py",
    "nnx/module_test.py",
    "nnx/graph_utils_test.py",
    "nnx/integration_test.py",
    "nnx/summary_test.py",
    "nnx/nn/linear_test.py",
    "nnx/helpers_test.py",
    "nnx/bridge/wrappers_test.py",
]

made = set()  # of the running test: the classes that it made objects of


def count(kind, method):
    """Returns `kind`, which from now on tells when an object of it is made."""
    original = getattr(kind, method)

    def counted(self, *args, **kwargs):
        made.add(kind)
        return original(self, *args, **kwargs)

    setattr(kind, method, functools.wraps(original)(counted))
    return kind


def pytest_configure(config):
    linen = count(bnjax.linen.BatchNorm, "__post_init__")
    nnx = count(bnjax.nnx.BatchNorm, "__init__")
    flax.linen.BatchNorm = flax.linen.normalization.BatchNorm = linen
    flax.nnx.BatchNorm = flax.nnx.nn.normalization.BatchNorm = nnx


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skips, after the fact, what has nothing to do with us."""
    report = yield
    if call.when == "call" and not made:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "makes no BatchNorm")
    if call.when == "call":
        made.clear()
    return report


def main(checkout):
    """Returns the tests that fail with our classes and pass with Flax's own."""
    tests = Path(checkout) / "tests"
    with tempfile.TemporaryDirectory() as cache:
        run(tests, cache, ours=True, arguments=FILES)
        failed = read_failed(cache)
        if failed:
            run(tests, cache, ours=False, arguments=failed)
        return sorted(set(failed) - set(read_failed(cache)) - set(BIASED))


def run(tests, cache, *, ours, arguments):
    """Runs tests of Flax in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-c", os.devnull]
    command += ["--rootdir", ".", "-o", f"cache_dir={cache}", *arguments]
    if ours:
        command += ["-p", Path(__file__).stem]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run(command, cwd=tests, env={**os.environ, "PYTHONPATH": path})


def read_failed(cache):
    """Returns the names of the tests that failed in the last run."""
    path = Path(cache) / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    wrong = main(*sys.argv[1:])
    print("\n".join(wrong) or "All pass, but for those that pin the biased variance.")
    sys.exit(bool(wrong))
