"""Experiments of papers, through real nodes in the simulator: `./scripts/reproduce NAME`.

Rule: a module is one paper's experiment, with one `EXPERIMENT`; a name that begins with an
underscore is a helper. Same seed, same table.
"""
