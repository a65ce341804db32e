"""Programs that ship with the package, written as any author would: with the public API."""
