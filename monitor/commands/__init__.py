"""The commands of `attnwatch`, one file each: `add` describes it, `run` carries it out and returns the exit code."""
