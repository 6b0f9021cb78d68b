"""From somebody's data to a configuration file that runs, and checks of both without training."""
