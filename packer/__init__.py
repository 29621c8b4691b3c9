"""JSONL sources with image references -> zip bundles with byte-offset records. No Ray, torch or Energon in here."""
