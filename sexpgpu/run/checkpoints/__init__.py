"""Checkpoints: `manifest` and `find` need no torch (the command line asks them for threads first), `store` does."""
