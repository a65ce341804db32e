"""From a caller's model through the passes to the compiled one."""
