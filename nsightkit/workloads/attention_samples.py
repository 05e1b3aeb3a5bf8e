"""Samples of the attention sweep: what they are called, and what the codes in them mean.

Samples are numbers under a name, so a cell's place in the sweep stands in the name, and its status and the reason for
it are codes. What measures writes them, what analyses reads them, and both have them from here.
"""

from __future__ import annotations

import re

__all__ = ["DIRECTIONS", "METRIC", "REASONS", "STATUSES", "metric"]

DIRECTIONS = ("forward", "backward")

#: What became of one direction of a cell; the code is the position. Codes are only ever appended.
STATUSES = ("ok", "oom", "unsupported", "skipped", "failed")

#: Why it is not ``ok``; the code is the position. Codes are only ever appended. ``{context}`` is the context length at
#: which an earlier cell of the same width ran out of memory.
REASONS = (
    "",
    "out of memory",
    "this backend computes in 16 bits only",
    "the head is wider than this backend takes",
    "this backend does not exist on this device",
    "this device has no TF32",
    "PyTorch refuses this backend for these inputs",
    "the forward pass ran out of memory, so there is nothing to go back through",
    "cannot fit: forward already ran out of memory at context {context}",
    "cannot fit: backward already ran out of memory at context {context}",
    "it would take longer than the time that was left",
    "it ended in an error, which is kept with the sizes",
    "an error in an earlier cell ended the work of the GPU",
)
_, RAN_OUT, SIXTEEN_BITS, TOO_WIDE, ABSENT, NO_TF32, REFUSED, *_MORE = REASONS
NO_FORWARD, FORWARD_CANNOT_FIT, BACKWARD_CANNOT_FIT, NO_TIME, BROKEN, LOST = _MORE

#: A name as :func:`metric` makes it.
METRIC = re.compile(
    r"(?P<quantity>[a-z_]{1,40}) (?P<implementation>[a-z][a-z-]{0,30})-(?P<precision>[a-z0-9]{2,8})"
    r"(?: d=(?P<d>[1-9]\d{0,6}) context=(?P<context>[1-9]\d{0,8}))?"
)


def metric(quantity: str, column: str, d: int | None = None, context: int | None = None) -> str:
    """Name a sample of a cell, or of a whole column.

    Parameters
    ----------
    quantity : str
        With its unit, such as ``forward_ns``.
    column : str
        Implementation and precision, such as ``naive-fp32``.
    d, context : int, optional
        The cell; left out for what holds for the column.

    Returns
    -------
    str

    Examples
    --------
    >>> metric("forward_ns", "naive-fp32", 64, 1024)
    'forward_ns naive-fp32 d=64 context=1024'
    """
    return f"{quantity} {column}" + ("" if d is None else f" d={d} context={context}")
