"""The control plane: HTTP/1.1 with JSON on a unix socket, and its clients.

Rule: `routes` is the one table of requests; nothing listens on TCP unless
the configuration asks for it. Importing this package loads nothing: the command line takes
`client` and `errors` alone, and those know neither trio nor the engine.
"""
