"""What a sweep searches, in words. Pure."""

from __future__ import annotations

from ugro.policy.sweep.space import Kind, Parameter

_MOST_NAMED = 8


def words_of(one: Parameter) -> str:
    """Such as ``whole numbers from 2 to 8``."""
    kind = one.distribution.removeprefix("q_")
    if one.is_constant:
        return f"always {one.values[0]}"
    if one.axis.kind is Kind.CHOICE:
        named = ", ".join(str(value) for value in one.values[:_MOST_NAMED])
        more = len(one.values) - _MOST_NAMED
        return f"{named}{f' and {more} more' if more > 0 else ''}{', by their probabilities' if one.weights else ''}"
    steps = f", in steps of {one.q:g}" if one.q is not None else ""
    if kind in ("normal", "log_normal", "beta"):
        return f"{kind.replace('_', '-')} with {one.shape[0]:g} and {one.shape[1]:g}{steps}"
    what = "whole numbers from" if one.axis.kind is Kind.WHOLE else "from"
    curve = ", logarithmic" if "log_uniform" in kind else ""
    return f"{what} {one.low:g} to {one.high:g}{curve}{steps}"
