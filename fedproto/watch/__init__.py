"""Runs, sweeps and deployed federations as a live web page, read from their folders alone.

Nothing here writes to a run folder, imports a plug-in or executes anything from a file.
"""
