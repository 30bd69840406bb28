"""The ticks of the curve that `pagoda replay --curve` draws."""

from __future__ import annotations

import pytest

from pagoda_tools.cli.hit_rate_plot import _short


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (999.4 * 2**10, "999 KiB"),
        (999.6 * 2**10, "0.976 MiB"),
        (1023 * 2**30, "0.999 TiB"),
        (1210 * 2**50, "1,210 PiB"),
        (999.7 * 2**50, "1,000 PiB"),
    ],
)
def test_a_size_has_no_exponent(nbytes: float, text: str) -> None:
    assert _short(nbytes) == text
