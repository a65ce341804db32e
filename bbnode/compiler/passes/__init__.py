"""The passes, one file each.

Rule: file name = pass name = class attribute `name`; `bbnode.compiler.driver.pipeline` loads them by
name and fixes their order.
"""
