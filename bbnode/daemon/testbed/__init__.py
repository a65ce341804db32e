"""`bbnode up`: any program as a local testbed, a process for each node."""
