"""What a program is recorded with: Modules, their Graphs, slots and names."""
