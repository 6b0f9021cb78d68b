"""Combiners, one file each: what takes the place of the mean of the uploads.

| | value of a row, over the n uploads that have it | withstands, of n | uses weights |
|---|---|---|---|
| sum | Σ_i w_i x_i / Σ_i w_i | none | yes |
| median | the median of each coordinate | fewer than n/2 | no |
| trimmed-mean | the mean of each coordinate without its extremes | those cut on one side | no |
| krum | the upload nearest to its n − f − 2 neighbours | f, if n ≥ 2f + 3 | no |
| geometric-median | argmin_v Σ_i w_i ‖v − x_i‖ | less than half of the weight | yes |
| secure-sum | as sum, but the server sees only the sums | none | yes |

A combiner that uses weights trusts what clients say about their numbers of samples.
"""
