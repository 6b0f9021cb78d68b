"""Numbers as the command line writes them."""

from __future__ import annotations


def percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal.

    >>> percent(0.5), percent(-0.0001)
    ('50.0', '0.0')
    """
    return without_minus_zero(f"{100 * fraction:.1f}")


def signed_points(points: float) -> str:
    """Return a difference with its sign; what is rounded to nothing has none.

    >>> signed_points(1.25), signed_points(-2.0), signed_points(-0.01)
    ('+1.2', '-2.0', '0.0')
    """
    written = f"{points:+.1f}"
    return "0.0" if float(written) == 0 else written


def without_minus_zero(written: str) -> str:
    """Return a number as it is written, without the sign of a negative one that rounds to 0."""
    return written.removeprefix("-") if float(written) == 0 else written
