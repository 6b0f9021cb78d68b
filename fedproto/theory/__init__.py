"""The convergence proof of the paper, as formulas and as measurements on a run."""
