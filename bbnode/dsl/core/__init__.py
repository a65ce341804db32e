"""Recording of programs: Modules, their Graphs, slots and names."""
