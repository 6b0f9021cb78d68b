"""What a restored server does about rounds that it has forgotten and its members have not.

A member trains each round once and never goes back: it refuses a round before its last one, and
says which its last one was. The server goes on after that one. So nothing of a member's protection
has to be lifted for a restored server, and one that only claims to be restored gains nothing.
"""

from __future__ import annotations

from fedproto.deploy.history import PASSED, is_just_restored, make_event
from fedproto.deploy.server_actions import Say, save_state
from fedproto.deploy.server_state import ServerState


def pass_over_rounds(state: ServerState, needed: int, say: Say) -> bool:
    """Go on after the rounds that members trained before a restore; return whether there were any.

    As few rounds are passed over as let `needed` members take part again. Nothing is passed over
    unless the state was restored, and no round was closed since.
    """
    claims = sorted(state.later_rounds.values())
    place = needed - len(state.replies) - 1
    if not is_just_restored(state.history, state.round) or not 0 <= place < len(claims):
        return False
    first = state.round + 1
    last = claims[place]
    names = sorted(name for name, round in state.later_rounds.items() if round <= last)
    titles = ", ".join(state.title(name) for name in names)
    what = f"rounds {first} to {last}, which {titles} had trained before"
    state.round = last
    state.replies.clear()  # to requests for a round that is passed over
    state.later_rounds.clear()
    state.history.append(make_event(PASSED, last, what))
    save_state(state, say)
    say(f"{what}, are passed over: the server was restored from a backup")
    return True


def explain_later_rounds(state: ServerState) -> str:
    """Return what to do if members are ahead of the server, as the end of a sentence, or ""."""
    if not state.later_rounds:
        return ""
    last = max(state.later_rounds.values())
    folder = state.path.parent
    return (
        f"; members have trained up to round {last}, which this state does not know: if it comes "
        f"from a backup, enter that with `fedproto deploy restore {state.path} {folder}`"
    )
