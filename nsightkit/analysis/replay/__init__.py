"""Play a recorded run again as a schedule, as it was or with a change made.

The schedule keeps what the recording says of each part alone: the CPU's own time between two calls, how long an
operation runs on the GPU, the order on a stream, who launched what, who waits for what. It does not keep when anything
happened: that follows. An operation starts when its launch has reached the device, the one before it on its stream has
ended, and what it waits for on other streams is done. A blocking call returns when what it waits for is done. Three
latencies stand between these, each a constant of the trace, the median of what was recorded: from a launch to the start
on an idle stream, from one operation to the next behind it in a queue, and from the end of the work to the return of
the call that waits. So the unchanged replay is a prediction as well, and its error says what a replay is worth.

Recordings rarely say which wait was for what. An operation that starts just after one on another stream has ended, and
later than its launch and its own stream explain, waited for it; a call that blocks waited for the stream that drained
just before it returned. ``inferred`` counts these.

The stages are modules, each a function from frozen tables to frozen tables: ``operations`` (the GPU's work, its
launches, the calls that block), ``waiting_threads`` (who waits for another thread, or for data), ``latencies``,
``streams`` (waits between streams, collectives) and ``cuts``; ``schedule`` puts them together. ``play`` plays it.
Arrays are reduced between *cuts* (blocking calls, launches into a full queue, ends of steps): what lies between two
cuts of a stream is a *segment* (``layout``), one line, ``end = max(launching thread's delay + a, stream's last end +
b)``. A play is a list of waits: of each moment (a cut, or the end of a segment) those that it waits for, and by how
much it is later. That list is walked once.
"""

from __future__ import annotations

from nsightkit.analysis.replay.model import Change, Played, Unplayable
from nsightkit.analysis.replay.schedule import Schedule, read

__all__ = ["Change", "Played", "Schedule", "Unplayable", "read"]
