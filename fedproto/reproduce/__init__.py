"""Every table and figure of the paper, and some studies it lacks: settings in one file each, runs, tables, figures.

specs/*.toml   what is run: rows x columns x seeds, and a quick version
plan.py        a spec as the cells of a sweep
archive.py     finished cells as one file that can travel
probes.py      what needs the trained models: embeddings, prototypes without a member's own share
tables.py      the runs' results as JSON and Markdown
pictures.py    the figures
statistics.py  paired tests with three outcomes: a difference, equivalence, undecided
verdicts.py    the paper's claims, judged
verdict_page.py  the verdicts as a page and a CSV
"""
