"""Python loads a module of this name before a script. `attnwatch run` puts this folder first on PYTHONPATH."""

from attnwatch.monitor.attach import launched

launched.begin()
