"""Watching a script that was not written for it: from its start, or while it already trains."""
