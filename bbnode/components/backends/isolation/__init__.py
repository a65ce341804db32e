"""Graphs in a process of their own, so that native code that dies takes one execution along.

Rule: one child process per backend, started afresh (never forked from a process with threads), that
has a copy of nothing: a graph goes over once and tensors in shared memory. It may compute and read
files, within limits of memory; the parent limits its time. What comes back is checked as what a
stranger sent would be.

- `shared`: values in shared memory, and the messages about them.
- `sandbox`: what the child denies itself.
- `worker`: the child.
- `child`: one child, as its parent sees it.
- `supervisor`: starts children, and finds out which run is to blame when one dies.
"""
