"""Real work through real daemons: each job with its data, its commands and an independent check."""
