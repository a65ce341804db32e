"""Records of what came in, and their replay."""
