"""Analyses: facts about a program that passes compute without changing it."""
