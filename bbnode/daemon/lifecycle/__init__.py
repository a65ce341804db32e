"""A daemon's life: parts made from the configuration, the start, the run, the stop."""
