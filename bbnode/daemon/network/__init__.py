"""Peers on the network: finding and dialling them, pings, dial-backs, misconduct."""
