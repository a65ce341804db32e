"""The node's state on disk: checkpoints, the record of a run, unacknowledged envelopes."""
