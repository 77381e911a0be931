"""The trainers people use: each in a file of its own that needs its library, all on `attached.py`."""
