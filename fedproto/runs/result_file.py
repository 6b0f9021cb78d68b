"""What result.json and a line of metrics.jsonl must hold for those who read them; anybody may have written them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedproto.errors import RunFolderError, shown

Accepts = Callable[[Any], bool]


def checked_result(content: Any, where: str) -> dict[str, Any]:
    """Return the content of a result.json, or raise a sentence that names the first entry that is not one."""
    _check_entries(content, _RESULT, where)
    for number, client in enumerate(content["clients"]):
        _check_entries(client, _CLIENT, f"{where}: client {number}")
        images = client.get("images")
        is_counts = isinstance(images, list) and all(map(_is_whole, images))
        if images is not None and not (is_counts and len(images) == len(client["classes"])):
            raise RunFolderError(
                f"{where} is damaged: the 'images' of client {number} are not a count per class"
            )
    return content


def checked_line(content: Any, where: str) -> dict[str, Any]:
    """Return the content of a line of metrics.jsonl, or raise such a sentence."""
    _check_entries(content, _LINE, where)
    if not _are_numbers(content.get("loss_std", {})):  # a run of an older version has none
        raise RunFolderError(f"{where} is damaged: 'loss_std' must be numbers by name")
    return content


def _check_entries(content: Any, wanted: dict[str, tuple[Accepts, str]], where: str) -> None:
    if not isinstance(content, dict):
        raise RunFolderError(f"{where} is damaged: it holds {shown(content, 40)}, not an object")
    for key, (accepts, description) in wanted.items():
        if key not in content:
            raise RunFolderError(f"{where} is damaged: it lacks {key!r}")
        if not accepts(content[key]):
            found = shown(content[key], 40)
            raise RunFolderError(f"{where} is damaged: {key!r} must be {description}, not {found}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**1000  # larger ones are no floats


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_spreads(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_are_numbers(each) and {"mean", "std"} <= each.keys() for each in value.values())


def _are_spreads_or_none(value: Any) -> bool:
    return value is None or _are_spreads(value)


def _is_traffic(value: Any) -> bool:
    wanted = {"values_per_round", "bytes_up", "bytes_down"}
    return _are_numbers(value) and wanted <= value.keys()


def _is_time(value: Any) -> bool:
    return _are_numbers(value) and {"total"} <= value.keys()


_NAMES = (_are_texts, "a list of names")
_SPREADS = "a mean and a std for each way to predict"
_RESULT: dict[str, tuple[Accepts, str]] = {
    "algorithm": (_is_text, "text"),
    "dataset": (_is_text, "text"),
    "seed": (_is_whole, "a whole number"),
    "rounds": (_is_count, "a whole number above 0"),
    "classes": _NAMES,
    "partition": (_is_text, "the SHA-256 of partition.json"),
    "clients": (_are_objects, "a list of objects"),
    "accuracy": (_are_spreads, _SPREADS),
    "communication": (_is_traffic, "values_per_round, bytes_up and bytes_down"),
    "seconds": (_is_time, "numbers, `total` among them"),
}
_CLIENT: dict[str, tuple[Accepts, str]] = {
    "id": (_is_whole, "a whole number"),
    "model": (_is_text, "text"),
    "classes": _NAMES,
    "accuracy": (_are_numbers, "a number for each way to predict"),
}
_LINE: dict[str, tuple[Accepts, str]] = {
    "round": (_is_count, "a whole number above 0"),
    "loss": (_are_numbers, "numbers by name"),
    "accuracy": (_are_spreads_or_none, f"null, or {_SPREADS}"),
    "bytes_up": (_is_whole, "a whole number"),
    "bytes_down": (_is_whole, "a whole number"),
    "seconds": (_is_number, "a number"),
}
