"""Access to a node: files, protocol and control of private networks and lists."""
