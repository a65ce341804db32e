"""The rounds that a node ran, kept on disk, and passed to trackers."""
