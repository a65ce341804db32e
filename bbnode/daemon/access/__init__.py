"""Who may talk to this node: files, protocol and control of networks and lists."""
