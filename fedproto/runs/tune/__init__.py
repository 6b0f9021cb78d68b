"""Hyper-parameters chosen by accuracy on validation rows: `fedproto tune`.

space.py           a search as text or as Python values, and drawing from it
default_spaces.py  what is searched where nothing is said, per algorithm
candidates.py      the settings that are tried, checked before anything is trained
halving.py         who goes on after which round
search.py          trains the candidates and ranks them
record.py          tune.json and best.toml
tuning.py          `fedproto.tune`
"""
