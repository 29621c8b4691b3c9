"""The recipe, the Ray jobs and the `bayplan` command."""
