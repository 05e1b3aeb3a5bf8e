"""Folders of planted ranks for the benchmark: as many as are asked for, of a hundred thousand events each.

Eight ranks are written, one of them late, each on a clock of its own; the others are links to these.
"""

from __future__ import annotations

import os
from pathlib import Path

from synthetic.planted_ranks import job

#: Layers and steps that make a hundred thousand events: kernels, calls, ranges, copies, waits.
_LAYERS, _STEPS, _DISTINCT = 100, 162, 8


def make(folder: Path, ranks: int) -> Path:
    """Make a folder with one trace a rank.

    Parameters
    ----------
    folder : Path
        Where the folders of ranks are.
    ranks : int

    Returns
    -------
    Path
        Kept when it is there already.
    """
    distinct = folder / "ranks"
    if not distinct.exists():
        draft = folder / "ranks.draft"
        draft.mkdir(parents=True, exist_ok=True)
        offsets = {rank: 1_000_003 * rank for rank in range(_DISTINCT)}
        job(draft, {2: "slow"}, ranks=_DISTINCT, steps=_STEPS, layers=_LAYERS, offsets_ns=offsets)
        draft.rename(distinct)
    out = folder / f"ranks-{ranks}"
    if not out.exists():
        draft = folder / f"ranks-{ranks}.draft"
        draft.mkdir(exist_ok=True)
        for rank in range(ranks):
            link = draft / f"rank{rank}.sqlite"
            link.unlink(missing_ok=True)
            os.link(distinct / f"rank{rank % _DISTINCT}.sqlite", link)
        draft.rename(out)
    return out
