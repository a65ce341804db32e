"""Links: envelopes, queues and peers on top of a connection, whatever carries its bytes."""
