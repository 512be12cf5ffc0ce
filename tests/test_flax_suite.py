import os

import flax_suite
import pytest


@pytest.mark.slow
@pytest.mark.skipif("FLAX_CHECKOUT" not in os.environ, reason="needs FLAX_CHECKOUT")
def test_the_tests_of_flax_pass_with_our_layers():
    assert flax_suite.main(os.environ["FLAX_CHECKOUT"]) == []
