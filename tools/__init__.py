"""The builder of the book: stamps, runs, README, lint and site. `python -m tools --help` lists what it does."""
