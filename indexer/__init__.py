"""Exact token and image counts for every record of a dataset. Pure and local: no Ray, torch or Energon in here."""
