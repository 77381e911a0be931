"""Who is told: one class an output, each with `write(update)` and `close()`."""
