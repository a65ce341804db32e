"""The Python API: nodes of this process, and clients of running daemons.

Rule: one core, `bbnode.api.on_trio`; the asyncio and the blocking face call it on a thread with
trio's loop. Everything public is a name of `bbnode` itself.
"""
