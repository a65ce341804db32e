"""The rounds that a node made, kept on disk, and handed to trackers."""
