"""The passes. A class with a `name` is a pass; `bbnode.compiler.driver.pipeline` has the order."""
