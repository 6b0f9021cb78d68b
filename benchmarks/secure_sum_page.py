"""The page and the figure of the cost of secure sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = (
    "upload",
    "members",
    "shares with",
    "plain bytes up",
    "bytes up",
    "bytes down",
    "member, s",
    "server, s",
    "largest error (bound)",
)


def make_page(found: Mapping[str, Any]) -> str:
    """Return results/secure-sum.md."""
    lines = [
        "# What a secure sum costs",
        "",
        "<!-- Made by `python3 -m benchmarks.secure_sum`; do not edit. -->",
        "",
        "Bytes and seconds of processor time of one member in one round, over all four stages, and "
        "the seconds of the server. One member in ten is gone after the shares. Numbers have 64 "
        "bits (the default range of 10⁶ and error of 10⁻⁶). Plain bytes are those of the same "
        "upload without a secure sum, for a client with all ten classes.",
        "",
        "![bytes and seconds per member](secure-sum.png)",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += [_make_row(found, measured) for measured in found["measured"]]
    lines += [
        "",
        "¹ Only some of the members were run, and the server's time was computed from that of some "
        "secrets and masks; the sum was not compared.",
        "",
        "Seconds of a member by stage:",
        "",
        "| upload | members | shares with | keys | shares | masked | unmasking |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_make_stage_row(measured) for measured in found["measured"]]
    machine = found["machine"]
    lines += [
        "",
        f"Measured in {found['seconds']:.0f} seconds on one core ({machine['processor']}), Python "
        f"{machine['python']}, fedproto {machine['fedproto']}.",
        "",
    ]
    return "\n".join(lines)


def _make_row(found: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    case = measured["case"]
    error = measured["largest_error"]
    mark = "¹" if case["sampled"] else ""
    compared = "–" if error is None else f"{error:.1e} ({measured['error_bound']:.1e})"
    cells = [
        case["vector"],
        f"{case['members']:,}",
        _describe_graph(case),
        f"{found['plain_bytes'][case['vector']]:,}",
        f"{measured['bytes_up']:,.0f}",
        f"{measured['bytes_down']:,.0f}",
        f"{sum(measured['seconds'].values()):.3f}",
        f"{measured['server_seconds']:.2f}{mark}",
        compared,
    ]
    return "| " + " | ".join(cells) + " |"


def _make_stage_row(measured: Mapping[str, Any]) -> str:
    case = measured["case"]
    cells = [case["vector"], f"{case['members']:,}", _describe_graph(case)]
    cells += [f"{seconds:.4f}" for seconds in measured["seconds"].values()]
    return "| " + " | ".join(cells) + " |"


def _describe_graph(case: Mapping[str, Any]) -> str:
    return f"{case['neighbours']} neighbours" if case["neighbours"] else "all"


def draw_figure(found: Mapping[str, Any]) -> bytes:
    """Return a PNG: bytes up and seconds of a member against the number of members."""
    from fedproto.plots.colours import colour_at
    from fedproto.plots.style import figure_style, make_panels, marker_at, save_png

    with figure_style():
        canvas, panels = make_panels(width=8.4, height=3.6, columns=2)
        for number, vector in enumerate(found["plain_bytes"]):
            of_vector = [each for each in found["measured"] if each["case"]["vector"] == vector]
            look = {"color": colour_at(number), "marker": marker_at(number)}
            for has_few, dashes in ((False, "-"), (True, "none")):
                chosen = [each for each in of_vector if bool(each["case"]["neighbours"]) == has_few]
                members = [each["case"]["members"] for each in chosen]
                sent = [each["bytes_up"] for each in chosen]
                seconds = [sum(each["seconds"].values()) for each in chosen]
                fill = "none" if has_few else look["color"]
                neighbours = chosen[0]["case"]["neighbours"] if chosen else 0
                label = f"{vector}, {neighbours} neighbours" if has_few else vector
                style = look | {"linestyle": dashes, "markerfacecolor": fill, "label": label}
                panels[0].plot(members, sent, **style)
                panels[1].plot(members, seconds, **style)
            plain = found["plain_bytes"][vector]
            panels[0].axhline(plain, color=look["color"], linestyle=":", linewidth=1)
        for axes, title in zip(panels, ("bytes up", "seconds"), strict=True):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.set_xlabel("members")
            axes.set_title(f"{title} of a member per round")
        panels[0].set_xlabel("members (dotted: bytes without a secure sum)")
        handles, labels = panels[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=2)
        return save_png(canvas)
