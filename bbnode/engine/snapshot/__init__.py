"""The state of a node as bytes, and back: everything that its next steps depend on.

The convention. A table that outlives a poll has a pair of methods:

    def state(self, writer: SnapshotWriter) -> Any: ...  # None, bool, int, str, bytes, lists
    def load(self, plain: Any, reader: SnapshotReader) -> None: ...  # into a fresh table

and a row in `Runtime.tables`, which also says in which order they are loaded. What a table refers
to (a peer, a value, an op, a frame, a timer, a charge, a line) goes through the writer and the
reader (`codec.py`), never by itself, so that what was one object is one object again. Objects with
fields are rows, whose forms are declared once (`codec.RowForm`). `load` may raise anything that
malformed data makes it raise: `restore_snapshot` turns it into SnapshotRefused.

What a snapshot is:

- Magic, SHA-256 of the body, body (one msgpack map). What is torn, changed, newer, of another peer,
  of another program or of other components is refused with its reason.
- It is taken between two polls: then nothing waits to be sent, and no step waits to be told.
- Time. A node's own clock goes on where the snapshot was taken: the first poll after a restore says
  how far the host's clock is off, and from then on the node translates. Time during which it did
  not run does not pass for it, and its steps are the same whatever the host's clock starts from.
- Work elsewhere. An op that was handed out (`@offload`) is handed out again by the first poll, as a
  RunTask with its old token, before anything else; its component comes back as it was before
  the op began. For that the node calls `freeze()` before it hands out (by default that is
  `serialize()`; a component whose state is replaced, never changed, only keeps references),
  unless the method only reads (`@offload(reads_only=True)`), or the node was installed with
  `snapshots=False`: then a snapshot is refused with NodeBusy while such an op is out. What an op
  leaves behind that failed by its deadline while its thread went on is not repeated.
  An open completion belongs to the component, which is asked for its state as it is; the op waits
  on, and fails by its deadline unless the host completes its token.
- Lives. A restored node is a new incarnation: ids on the wire come from a new stream, so that none
  is made again that was made after the snapshot; its connections are gone, and PeerDown says so.
  Requests that were open stay open under their old ids. With `same_life` (simulators, replay) it is
  the old life that goes on: the same ids, the same connections, every task out again.
- Not in it: settings and limits (the install's apply), the graphs (the digest of the program is),
  caches, gauges, sockets, threads.
"""

from __future__ import annotations
