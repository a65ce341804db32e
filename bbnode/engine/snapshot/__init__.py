"""The state of a node as bytes, and back: everything that its next steps depend on.

The convention. A table that outlives a poll has a pair of methods:

    def state(self, writer: SnapshotWriter) -> Any: ...  # None, bool, int, str, bytes, lists
    def load(self, plain: Any, reader: SnapshotReader) -> None: ...  # into a fresh table

and a row in `Runtime.tables`, whose order is that of loading. A table saves its references (to a
peer, a value, an op, a frame, a timer, a charge, a line) through the writer and loads them through
the reader (`codec.py`), so that shared objects are shared again. Objects with fields are rows,
whose forms are declared once (`codec.RowForm`). `load` may raise anything on malformed data:
`restore_snapshot` turns it into SnapshotRefused.

The format and its meaning:

- Bytes: magic, SHA-256 of the body, body (one msgpack map). A snapshot that is torn, changed,
  newer, or of another peer, program or set of components is refused with the reason.
- It is taken between two polls, when no envelope waits to be sent and no step to be returned.
- Time. A restored node's own clock continues from the snapshot: the first poll gives the offset of
  the host's clock, by which the node translates from then on. Time while it did not run does not
  count, and its steps do not depend on where the host's clock starts.
- Offloaded work. The first poll hands out every op again that was in a thread (`@offload`), as a
  RunTask with its old token, before anything else, with its component in the state from before the
  op. For that the node calls `freeze()` before it hands an op out (by default `serialize()`; a
  component whose state is replaced, never changed, only keeps references). It does not if the
  method only reads (`@offload(reads_only=True)`), or if the node was installed with
  `snapshots=False`; in the latter case a snapshot is refused with NodeBusy while such an op is out.
  The effects of a thread that ran on after its op had failed by its deadline are not repeated.
  An open completion belongs to the component, whose current state is saved; the op keeps waiting,
  and fails by its deadline unless the host completes its token.
- Lives. A restored node is a new incarnation: ids on the wire come from a new stream, so that none
  is used twice; its connections are gone, which PeerDown reports. Open requests stay open under
  their old ids. With `same_life` (simulators, replay) the old life continues: the same ids, the
  same connections, every task handed out again.
- Not included: settings and limits (those of the install apply), graphs (only the program's
  digest), caches, gauges, sockets, threads.
"""

from __future__ import annotations
