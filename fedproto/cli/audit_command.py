"""`fedproto audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_table, say


def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="finished run folders, to attack and compare"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.html, or a folder [audit.html in the run, or here for several]",
            show_default=False,
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="classes, reconstruction, gradients or membership; may be repeated [all]",
            show_default=False,
        ),
    ] = None,
    federations: Annotated[
        int, typer.Option(help="federations that a membership attack trains")
    ] = 48,
    rounds: Annotated[
        int | None,
        typer.Option(help="rounds of each of them [the run's]", min=2, show_default=False),
    ] = None,
    targets: Annotated[int, typer.Option(help="prototypes to reconstruct images from", min=1)] = 12,
    victims: Annotated[int, typer.Option(help="clients whose updates are inverted", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="steps of a gradient inversion", min=1)] = 400,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Attack finished runs, and write what leaks as one HTML page with pictures."""
    import json

    from fedproto.audit import write
    from fedproto.audit.attacks import Effort

    effort = Effort(federations, rounds, targets, victims, steps)
    page = write(runs, out, attack or [], effort, notice=say)
    found = json.loads(page.with_suffix(".json").read_text())
    print_table(("run", "attack", "found"), _list_findings(found["runs"]))
    say(f"written to {page}")


def _list_findings(runs: list[dict]) -> list[tuple[str, str, str]]:
    """Return a line for each attack on each run."""
    lines = []
    for run in runs:
        attacks = run["attacks"]
        if "classes" in attacks:
            found = attacks["classes"]
            share = f"{found['right_classes']:.1%} of all pairs of client and class are right"
            lines.append((run["name"], "classes", f"{share} (guessing: {found['guessing']:.1%})"))
        for each in attacks.get("reconstruction", {}).get("attackers", []):
            means = each["all"]
            text = (
                f"{each['attacker']}: SSIM {means['ssim_own']:.2f}, rank {means['rank']:.1f} of "
                f"{means['candidates']:.0f}"
            )
            lines.append((run["name"], "reconstruction", text))
        for each in attacks.get("gradients", {}).get("cases", []):
            text = (
                f"{each['case']}: PSNR {each['psnr']:.1f} dB "
                f"(class name only: {each['baseline_psnr']:.1f})"
            )
            lines.append((run["name"], "gradients", text))
        for each in attacks.get("membership", {}).get("attackers", []):
            rate = each["true_positives_at"]["0.01"]
            text = (
                f"{each['attacker']}: {rate['value']:.1%} true positives at 1% false, "
                f"epsilon at least {each['epsilon_at_least']:.2f}"
            )
            lines.append((run["name"], "membership", text))
        for name, reason in run["left_out"].items():
            lines.append((run["name"], name, f"does not apply: {reason}"))
    return lines
