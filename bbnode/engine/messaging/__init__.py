"""Messages between components of different peers, and the timers of components."""
