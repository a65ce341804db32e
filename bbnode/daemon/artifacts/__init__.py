"""The compiled artifact: reading and checking it, building it, and showing its content."""
