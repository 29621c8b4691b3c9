"""The layout on disk, format version 1: the only place that knows it. README.md beside this file is the specification."""
