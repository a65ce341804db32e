"""One module for each command: its name is the module's, its function is `command`.

Rule: the list of commands is derived from the files here. A command with commands of its own
has `app`, a `typer.Typer` made by `bbnode.cli.common.group`, instead of `command`. A command
returns its exit code (None is 0), and raises `BbnodeError` for what the user has to fix.
"""
