"""Who may talk: networks and their members, tickets, and the one policy that decides.

Rule: everything here is a pure function of its arguments, clock included, but for
`key_file`, which reads and writes private keys.
"""
