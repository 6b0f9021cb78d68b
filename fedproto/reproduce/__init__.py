"""The paper's tables, figures and claims, and some studies that it lacks.

specs/*.toml     what is run: rows x columns x seeds, and a quick version
plan.py          from a spec to the cells of a sweep
make.py          makes a target: runs what is missing, then writes its files
archive.py       finished cells in one file that can be moved to another machine
probes.py        what needs the trained models: embeddings, prototypes without a client's own share
tables.py        the runs' results as JSON
table_page.py    the JSON as Markdown
markdown.py      tables in Markdown
pictures.py      the figures
statistics.py    paired tests with three outcomes: a difference, equivalence, undecided
evidence.py      the JSON files of the targets, as measurements
claims.py        what a claim is, and how its verdict follows from comparisons
table_claims.py  the claims that are judged by the tables
study_claims.py  the claims that are judged by a figure or study each
verdicts.py      all claims, judged
verdict_page.py  the verdicts as a page and a CSV
"""
