"""Access control: networks and their members, tickets, and the one policy that decides.

Rule: everything here is a pure function of its arguments, clock included, but for
the files of private keys in `keys`.
"""
