"""Engines train the clients of a round. The reference engine is the oracle of every other."""
