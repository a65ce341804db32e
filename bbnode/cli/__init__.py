"""The command line.

Rule of this package: importing it, and printing its help, loads nothing heavy. One module of
`bbnode.cli.commands` is one command; it is imported when that command is used, and imports
the daemon, libp2p or ONNX only inside the function that needs them.
"""
