"""`fedproto reproduce table-methods`: every method of the package on equal terms.

methods.toml   the methods, data sets, partitions and what is searched: the one table to edit
benchmark.py   reads it, and plans the federations in the order in which they are run
tuning.py      chooses each method's settings on validation rows, and keeps them in one file
training.py    runs what is missing until the time is up
records.py     what is kept of a finished federation, and archives of it
gathering.py   the runs' results as JSON
page.py        the JSON as Markdown
claims.py      what the numbers say about which method is best, for the verdicts
"""
