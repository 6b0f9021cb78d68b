"""Checks what result.json and a line of metrics.jsonl hold, since anybody may have written them.

Commands that read run folders rely on these entries; files may hold more.
"""

from __future__ import annotations

from typing import Any

from fedproto.core.class_names import is_plain
from fedproto.core.entries import Entry, check_entries
from fedproto.errors import RunFolderError


def check_result(content: Any, where: str) -> dict[str, Any]:
    """Return the content of a result.json, or raise a sentence that names its first wrong entry."""
    check_entries(content, _RESULT, where)
    if "validation" in content:
        check_entries(content, _RESULT_WITH_VALIDATION, where)
    if "asynchronous" in content:
        check_entries(content, _RESULT_WITH_ASYNCHRONY, where)
    for number, client in enumerate(content["clients"]):
        check_entries(client, _CLIENT, f"{where}: client {number}")
        name = client.get("name", "0")  # a run of an older version has none
        if not isinstance(name, str) or not is_plain(name):
            raise RunFolderError(
                f"{where} is damaged: the name of client {number} must be a line of text"
            )
        images = client.get("images")
        if images is not None and not _is_count_per_class(images, client["classes"]):
            raise RunFolderError(
                f"{where} is damaged: the 'images' of client {number} are not a count per class"
            )
    return content


def check_line(content: Any, where: str) -> dict[str, Any]:
    """Return the content of a line of metrics.jsonl, or raise such a sentence."""
    check_entries(content, _LINE, where)
    if not _are_accuracies_or_none(content.get("validation")):
        raise RunFolderError(f"{where} is damaged: 'validation' must be {_ACCURACIES}")
    if not _are_numbers(content.get("loss_std", {})):  # a run of an older version has none
        raise RunFolderError(f"{where} is damaged: 'loss_std' must be numbers by name")
    return content


# --- kinds of values


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < 2**1000  # larger ones cannot become floats
    return isinstance(value, float)


def _is_non_negative_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_positive_int(value: Any) -> bool:
    return _is_non_negative_int(value) and value > 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(each) for each in value)


def _are_objects(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, dict) for each in value)


def _is_count_per_class(value: Any, classes: list[str]) -> bool:
    if not isinstance(value, list) or len(value) != len(classes):
        return False
    return all(_is_non_negative_int(each) for each in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(each) for each in value.values())


def _is_mean_with_std(value: Any) -> bool:
    return _are_numbers(value) and "mean" in value and "std" in value


def _are_accuracies(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_mean_with_std(each) for each in value.values())


def _are_accuracies_or_none(value: Any) -> bool:
    return value is None or _are_accuracies(value)


def _is_validation(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    has_score = _is_text(value.get("select_by")) and _is_number(value.get("score"))
    return has_score and _are_accuracies(value.get("accuracy"))


def _is_traffic(value: Any) -> bool:
    required = {"values_per_round", "bytes_up", "bytes_down"}
    return _are_numbers(value) and required <= value.keys()


def _is_asynchrony(value: Any) -> bool:
    return _are_numbers(value) and {"clock", "staleness"} <= value.keys()


def _is_time(value: Any) -> bool:
    return _are_numbers(value) and "total" in value


# --- what the files must hold

_TEXT = Entry(_is_text, "text")
_NAMES = Entry(_are_texts, "a list of names")
_NON_NEGATIVE_INT = Entry(_is_non_negative_int, "a whole number")
_POSITIVE_INT = Entry(_is_positive_int, "a whole number above 0")
_ACCURACIES = "a mean and a std for each way to predict"

_RESULT = {
    "algorithm": _TEXT,
    "dataset": _TEXT,
    "seed": _NON_NEGATIVE_INT,
    "rounds": _POSITIVE_INT,
    "classes": _NAMES,
    "partition": Entry(_is_text, "the SHA-256 of partition.json"),
    "clients": Entry(_are_objects, "a list of objects"),
    "accuracy": Entry(_are_accuracies, _ACCURACIES),
    "communication": Entry(_is_traffic, "values_per_round, bytes_up and bytes_down"),
    "seconds": Entry(_is_time, "numbers, `total` among them"),
}
_RESULT_WITH_VALIDATION = {
    "validation": Entry(_is_validation, "select_by, score and accuracy"),
    "best_round": _POSITIVE_INT,
    "stopped_round": _POSITIVE_INT,
}
_RESULT_WITH_ASYNCHRONY = {
    "asynchronous": Entry(_is_asynchrony, "clock and staleness"),
}
_CLIENT = {
    "id": _NON_NEGATIVE_INT,
    "model": _TEXT,
    "classes": _NAMES,
    "accuracy": Entry(_are_numbers, "a number for each way to predict"),
}
_LINE = {
    "round": _POSITIVE_INT,
    "loss": Entry(_are_numbers, "numbers by name"),
    "accuracy": Entry(_are_accuracies_or_none, f"null, or {_ACCURACIES}"),
    "bytes_up": _NON_NEGATIVE_INT,
    "bytes_down": _NON_NEGATIVE_INT,
    "seconds": Entry(_is_number, "a number"),
}
