"""Properties that `make test` tries on a few examples, and `make test-all` on many as well."""

import pytest
from hypothesis import given, settings


def often(few, many, *strategies):
    """`given` of two numbers of examples; the test with many is a slow one."""
    counts = [
        pytest.param(few, id=f"{few} examples"),
        pytest.param(many, id=f"{many} examples", marks=pytest.mark.slow),
    ]

    def tried(holds):
        @pytest.mark.parametrize("count", counts)
        def test(count):
            settings(max_examples=count)(given(*strategies)(holds))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return tried
