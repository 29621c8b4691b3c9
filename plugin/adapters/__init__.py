"""What a trainer plugs in. Each module imports its trainer, so none is imported from here."""
