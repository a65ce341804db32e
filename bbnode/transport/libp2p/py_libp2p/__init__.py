"""py-libp2p's own host on our connections: `BasicHost` and `Swarm`, with our transport as plug-in.

Rule: only this folder imports libp2p, and it is imported where such a transport is made. Our
host has the sockets, the handshake, the muxer, admission and our own protocols, whether this is
there or not; py-libp2p has a connection once its peer is admitted, and the streams of its own
protocols. Nothing that fails there ends more than a stream.
"""
