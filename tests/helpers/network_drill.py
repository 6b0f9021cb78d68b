"""A federation in a network, and what its members have done in each round."""

from pathlib import Path
from typing import Any

from helpers.flower import Run, digits, until
from helpers.flower_setups import Setup
from helpers.networks import Network, Networked

from fedproto.deploy.server_state import STATE_FILE, read_state


class Drill:
    """A federation in a network, started anew for each test by `fresh`."""

    def __init__(self, folder: Path, net: Network) -> None:
        files, self.arrays = digits(folder)
        self.federation = Networked(folder / "federation", files, net)
        self.setup = Setup(self.federation, files, self.arrays)
        self.net = net
        self.state = Path()

    def fresh(self, tag: str) -> dict[str, Any]:
        """Return the settings of a new federation, whose members are there; nobody is held."""
        self.federation.bring(*self.setup.files)
        for name in self.net.members:
            for file in ("asked", "hold", "trained"):
                (self.federation.odd(name) / file).unlink(missing_ok=True)
        config = self.setup.fresh(tag)
        self.state = Path(config["state"]) / STATE_FILE
        return config

    def hold(self, name: str, number: int) -> None:
        """Let a member wait in this round, before it trains, until `release`."""
        (self.federation.odd(name) / "hold").write_text(str(number))

    def release(self, name: str) -> None:
        (self.federation.odd(name) / "hold").unlink()

    def wait_until_asked(self, name: str, number: int) -> None:
        asked = self.federation.odd(name) / "asked"
        until(
            lambda: asked.exists() and asked.read_text() == str(number),
            f"{name} is asked for round {number}",
        )

    def wait_for_round(self, number: int) -> None:
        until(
            lambda: self.state.exists() and read_state(self.state)[1]["round"] >= number,
            f"round {number} is over",
        )

    def there(self, run: Run) -> list[str]:
        """The members whose replies counted, of each round."""
        counted = []
        for number in range(1, max(run.rounds) + 1):
            seats = run.rounds[number][1]["members"]
            names = [name for name in sorted(seats) if seats[name]["last_round"] == number]
            counted.append("".join(names))
        return counted

    def in_vain(self, run: Run) -> list[str]:
        """The members that trained, and whose replies did not count, of each round."""
        vain = []
        for number, counted in enumerate(self.there(run), 1):
            names = set(self.net.members) - set(counted)
            vain.append("".join(sorted(name for name in names if number in self.trained(name))))
        return vain

    def find_peers(self) -> set[str]:
        """The addresses that the server's connections come from."""
        return self.net.find_peers(self.federation.port)

    def trained(self, name: str) -> set[int]:
        """The rounds that a member has trained."""
        path = self.federation.odd(name) / "trained"
        return {int(word) for word in path.read_text().split()} if path.exists() else set()
