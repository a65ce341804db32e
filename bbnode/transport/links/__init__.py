"""Links: what envelopes, queues and peers need of a connection, whatever carries its bytes."""
