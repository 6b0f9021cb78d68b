"""The paper's claims, and some it does not make, each judged by the results of the targets.

A claim is a family of comparisons (statistics.py), for example one per other method and data set.
A claim whose target has not been made yet says so.
"""

from __future__ import annotations

from pathlib import Path

from fedproto.reproduce.claims import Claim
from fedproto.reproduce.evidence import read_results
from fedproto.reproduce.methods.claims import judge_methods
from fedproto.reproduce.privacy_claim import judge_privacy
from fedproto.reproduce.study_claims import (
    judge_best_lambda,
    judge_clusters,
    judge_distance,
    judge_few_images,
    judge_imbalance,
    judge_options,
    judge_start,
    judge_travel,
)
from fedproto.reproduce.table_claims import (
    judge_accuracy,
    judge_deviation,
    judge_mixed_models,
    judge_own_classes,
    judge_rounds,
    judge_traffic,
)
from fedproto.reproduce.theory_claims import judge_aggregation, judge_theory


def judge_all(folder: Path) -> tuple[list[Claim], list[Claim]]:
    """Return the paper's claims and further ones, judged by the JSON files in a folder."""
    results = read_results(folder)
    papers = [
        judge_accuracy(results),
        judge_deviation(results),
        judge_rounds(results),
        judge_traffic(results),
        judge_mixed_models(results),
        judge_few_images(results),
        judge_imbalance(results),
        judge_best_lambda(results),
        judge_distance(results),
        judge_start(results),
        judge_clusters(folder),
        judge_privacy(folder),
        *judge_theory(folder),
    ]
    further = [
        judge_own_classes(results),
        judge_travel(results),
        judge_options(results),
        judge_aggregation(folder),
    ]
    further += judge_methods(results)
    return papers, further
