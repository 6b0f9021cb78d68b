"""`fedproto deploy backup` and what follows a disaster or a move: see docs/backup.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.output import say

SERVER_HELP = "the server's state: a folder of `deploy init`, or its folder `server`"
MEMBER_HELP = "the member's TOML file, on its own machine"


WHERE_HELP = f"{SERVER_HELP}; or, at a member, its TOML file"


def backup(
    where: Annotated[Path, typer.Argument(help=WHERE_HELP)],
    folder: Annotated[Path, typer.Argument(help="where backups are kept; best another disk")],
) -> None:
    """Copy the state of the server or of a member to a folder, and check the copy.

    The server or member may be running. No backup is ever overwritten.
    """
    if where.suffix == ".toml":
        from fedproto.deploy.member_backup import back_up_member
        from fedproto.deploy.settings import read_member

        path, round, is_new = back_up_member(read_member(where, operated=True), folder)
    else:
        from fedproto.deploy.server_backup import back_up_server

        path, round, is_new = back_up_server(where, folder)
    when = "is backed up" if is_new else "has been backed up before"
    say(f"round {round} {when}: {path}")


def restore(
    backup: Annotated[Path, typer.Argument(help="a file that `deploy backup` made")],
    where: Annotated[Path, typer.Argument(help=WHERE_HELP)],
    replace: Annotated[
        bool, typer.Option("--replace", help="replace a state that is there; a copy is kept")
    ] = False,
    last_round: Annotated[
        int | None,
        typer.Option(
            help="the last round that members have trained; if left out, members tell a server. "
            "Of a member, the last that it took part in"
        ),
    ] = None,
) -> None:
    """Restore the server or a member from a backup; no round is trained twice.

    Given the server's own file as the backup, it only enters that this file was restored.
    """
    if where.suffix == ".toml":
        from fedproto.deploy.member_backup import restore_member
        from fedproto.deploy.settings import read_member

        own = read_member(where, operated=True)
        last = restore_member(backup, own, last_round, replace)
        say(f"{own.name} is restored, and takes part in rounds after round {last}")
        return
    from fedproto.deploy.server_backup import restore_server

    restored = restore_server(backup, where, replace, last_round)
    if restored.kept is not None:
        say(f"the state that was there is kept in {restored.kept}")
    say(
        f"{restored.path} is what the server had after round {restored.backup_round}; it goes on "
        f"after round {restored.round}, or after the last one that its members have trained"
    )


def rename(
    where: Annotated[Path, typer.Argument(help=f"{SERVER_HELP}; or, at the member, its TOML file")],
    old: Annotated[str, typer.Argument(help="the member's name so far")],
    new: Annotated[str, typer.Argument(help="its name from now on")],
) -> None:
    """Give a member another name, at the server and at the member; it keeps its state.

    At the member, its TOML file has the new name already.
    """
    if where.suffix == ".toml":
        from fedproto.deploy.member_changes import rename_own_state
        from fedproto.deploy.settings import read_member
        from fedproto.errors import ConfigError

        own = read_member(where, operated=True)
        if own.name != new:
            raise ConfigError(f"{where} has the name {own.name!r}: write {new!r} there first")
        rename_own_state(own, old)
        say(f"the state in {own.state} is that of {new} now")
        return
    from fedproto.deploy.server_backup import rename_member

    rename_member(where, old, new)
    say(f"{old} is called {new} now; register its key under this name before the next run")


def move_data(
    member: Annotated[Path, typer.Argument(help=MEMBER_HELP)],
    changed: Annotated[
        bool, typer.Option("--changed", help="accept that the number of rows has changed")
    ] = False,
) -> None:
    """Enter that a member's data is in another place, which its TOML file names already."""
    from fedproto.deploy.member_changes import move_own_data
    from fedproto.deploy.settings import read_member

    own = read_member(member, operated=True)
    rows = move_own_data(own, changed)
    say(f"{own.name} goes on with {sum(rows.values())} training rows in {own.data}")


def contribute(
    member: Annotated[Path, typer.Argument(help=MEMBER_HELP)],
    folder: Annotated[Path, typer.Argument(help="where the file is written")],
) -> None:
    """Write what a member can bring back to a server that has lost its disk.

    That is its last upload, which it had sent before, and the prototypes that it received last.
    """
    from fedproto.deploy.contributions import write_contribution
    from fedproto.deploy.settings import read_member

    path = write_contribution(read_member(member, operated=True), folder)
    say(f"{path} is for the server's operator, and for nobody else: `fedproto deploy rebuild`")


def rebuild(
    folder: Annotated[Path, typer.Argument(help="the folder that `deploy init` made")],
    files: Annotated[list[Path], typer.Argument(help="files that `deploy contribute` made")],
) -> None:
    """Make a new state of a server that has lost its disk, of what its members bring back."""
    from fedproto.deploy.rebuilding import rebuild_server

    state = rebuild_server(folder, files)
    count = len(state.members)
    say(f"{state.path} is made of what {count} members bring; it goes on after round {state.round}")
