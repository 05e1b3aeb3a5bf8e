"""Replay a recorded run as a schedule, unchanged or with a change.

The schedule keeps the parts: the CPU's time between two calls, the duration of each operation, the order on a stream,
the launching call of each operation, the waits. Start times follow from these. An operation starts when its launch has
reached the device, the one before it on its stream has ended, and its waits for other streams are over. A blocking call
returns when the awaited work is done. Three latencies lie in between, each a constant of the trace, the median of the
recorded ones: from a launch to the start on an idle stream, from one operation to the next behind it in a queue, and
from the end of the work to the return of the call that waits. So the unchanged replay is a prediction as well, and its
error measures how far to trust it.

Recordings rarely show the target of a wait. An operation that starts just after one on another stream has ended, and
later than its launch and its own stream explain, waited for it; a call that blocks waited for the stream that drained
just before it returned. ``inferred`` counts these.

The stages are modules, each a function from frozen tables to frozen tables: ``operations`` (the GPU's work, its
launches, the calls that block), ``waiting_threads`` (who waits for another thread, or for data), ``streams``
(latencies, waits between streams, collectives) and ``cuts``; ``schedule`` puts them together. ``play`` plays it.
Arrays are reduced between *cuts* (blocking calls, launches into a full queue, ends of steps): what lies between two
cuts of a stream is a *segment*, one line, ``end = max(launching thread's delay + a, stream's last end +
b)``. A play is a list of waits: for each moment (a cut, or the end of a segment) the moments it waits for, and the
delay after each. That list is walked in the recorded order.
"""

from nsightkit.analysis.replay.model import Change, Played, Unplayable
from nsightkit.analysis.replay.schedule import Schedule, read

__all__ = ["Change", "Played", "Schedule", "Unplayable", "read"]
