"""Points of many dimensions in two."""

from __future__ import annotations

import numpy as np

MAX_PERPLEXITY = 30.0


def project_by_tsne(points: np.ndarray) -> np.ndarray:
    """Return points (n, d) as places (n, 2) by t-SNE, the same for the same points."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(MAX_PERPLEXITY, (len(points) - 1) / 3)
    tsne = TSNE(2, init="pca", perplexity=perplexity, random_state=0)
    # Sums depend on the number of threads, and so few points gain nothing from a second one.
    with threadpool_limits(1):
        return tsne.fit_transform(points)


def project_by_pca(points: np.ndarray) -> np.ndarray:
    """Return points (n, d) as places (n, 2) by their first two principal components."""
    from sklearn.decomposition import PCA

    return PCA(2, svd_solver="full").fit_transform(points)
